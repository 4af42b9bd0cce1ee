"""Chats are rendered as vLLM renders them."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from gateway.prompt.chat import template_variables
from gateway.prompt.conversation import Unreadable, outline
from gateway.prompt.template import ChatTemplate, TemplateError
from gateway.prompt.tools import parse_tools
from tests.prompt_rig import (
    BODIES,
    SPECIAL_TOKENS,
    TEMPLATE_NAMES,
    TEMPLATES,
    chat_of,
    chat_request,
    load_json,
    template,
)

RENDERS = load_json(TEMPLATES / "renders.json")


def render(source: str, *messages: dict[str, object], **fields: object) -> str:
    chosen = ChatTemplate(source, SPECIAL_TOKENS)
    return chosen.render(chat_of({"messages": list(messages), **fields}, chosen))


USER = {"role": "user", "content": "Hello!"}


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize("body", BODIES)
def test_a_chat_is_rendered_to_what_vllm_makes_of_it(name, body):
    expected = RENDERS[name][body]
    if "text" in expected:
        assert template(name).render(chat_of(BODIES[body], template(name))) == expected["text"]
    else:
        with pytest.raises((TemplateError, Unreadable)):
            template(name).render(chat_of(BODIES[body], template(name)))


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_a_chat_is_rendered_to_what_transformers_makes_of_it(name):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chosen = template(name)
    for body in BODIES.values():
        try:
            chat = chat_of(body, chosen)
            text = chosen.render(chat)
        except (TemplateError, Unreadable):
            continue
        variables = chosen.variables(chat, chosen.messages(chat.shapes, iter(chat.leaves)))
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[variables.pop("messages")],
            chat_template=chosen.source,
            continue_final_message=chat.continue_final_message,
            **variables,
        )
        assert rendered == [text]


def test_templates_that_loop_over_content_get_parts_and_others_get_text():
    assert {name for name in TEMPLATE_NAMES if template(name).parts} == {"gemma", "parts"}


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] | list %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% set x = messages[1:] %}{% for m in x %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% for content in messages %}{% for c in content %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
        (
            "{% macro f(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ f(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro f(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ f(x=m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro f(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ f(m.name) }}{% endfor %}",
            False,
        ),
        (
            "{% for a, b in messages %}{% endfor %}"
            "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
            False,
        ),
    ],
)
def test_the_content_format_is_detected_by_vllms_rules(source, parts):
    assert ChatTemplate(source, {}).parts is parts


def test_the_date_is_todays():
    assert render("{{ strftime_now('%Y-%m-%d') }}", USER) == datetime.now().strftime("%Y-%m-%d")


def test_json_is_put_out_as_transformers_does_not_as_html():
    tool = {"type": "function", "function": {"name": "<f>", "description": "é'\""}}
    source = "{{ tools[0].function | tojson }}|{{ {'b': 1, 'a': [1.0]} | tojson(indent=1, sort_keys=true) }}"
    assert render(source, USER, tools=[tool]) == (
        '{"name": "<f>", "description": "é\'\\"", "parameters": null}|{\n "a": [\n  1.0\n ],\n "b": 1\n}'
    )


def test_special_tokens_are_variables_that_a_request_can_set():
    assert render("{{ bos_token }}{{ eos_token }}", USER) == "<s></s>"
    assert render("{{ bos_token }}", USER, chat_template_kwargs={"bos_token": "<B>"}) == "<B>"


def test_what_is_not_given_is_none():
    assert render("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", USER) == "TrueTrueTrue"


def test_documents_reach_the_template():
    source = "{% for d in documents %}{{ d.title }}{% endfor %}"
    assert render(source, USER, documents=[{"title": "One", "text": "x"}]) == "One"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_misbehaves_only_fails(source):
    with pytest.raises(TemplateError):
        render(source, USER)


def test_a_template_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("gateway.prompt.template.RENDER_LIMIT_S", 0.02)
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{{ j if false }}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="longer than"):
        render(endless, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% set s = namespace(n=0) %}{% for a in m %}{% for b in m %}{% set s.n = s.n + 1 %}{% endfor %}{% endfor %}",
        "{% for a in m %}{% if a in n %}x{% endif %}{% endfor %}",
        "{% for a in m %}{% for b in 'xy' %}{% set c = m | sum %}{% endfor %}{% endfor %}",
    ],
)
def test_loops_without_calls_or_output_are_stopped_too(monkeypatch, source):
    monkeypatch.setattr("gateway.prompt.template.RENDER_LIMIT_S", 0.02)
    many = {"m": list(range(3000)), "n": list(range(5000, 8000))}
    with pytest.raises(TemplateError, match="longer than"):
        render(source, USER, chat_template_kwargs=many)


@pytest.mark.parametrize("source", ["{{ 'x' * 10**9 }}", "{{ 10**9 * 'x' }}", "{{ [0] * 10**9 }}", "{{ 9**(9**9) }}"])
def test_a_template_that_multiplies_too_much_is_stopped_before(source):
    with pytest.raises(TemplateError, match="makes a value of more"):
        render(source, USER)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'ab' * 2 }}{{ 2 * 'ab' }}{{ 3 * 4 }}{{ 2 ** 8 }}{{ 1.5 * 2 }}{{ 2 ** 0.5 > 1 }}", "abababab122563.0True"),
        (
            "{% for i in m %}{{ loop.length }}{{ loop.revindex }}{{ ',' if not loop.last }}{% break %}{% endfor %}",
            "100100,",
        ),
        ("{% for i in m if i > 97 %}{{ loop.index }}{{ i }}{{ loop.nextitem }}{% endfor %}", "19899299"),
        (
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in nothing %}{% else %}-{% endfor %}",
            "a1-",
        ),
    ],
)
def test_watching_the_time_changes_nothing(source, expected):
    assert render(source, USER, chat_template_kwargs={"m": list(range(100))}) == expected


def test_a_template_that_puts_out_too_much_is_stopped(monkeypatch):
    monkeypatch.setattr("gateway.prompt.template.RENDER_LIMIT_CHARS", 1000)
    with pytest.raises(TemplateError, match="more than 1000 characters"):
        render("{% for i in range(2000) %}x{% endfor %}", USER)


def test_a_template_that_is_not_jinja_is_refused_at_once():
    with pytest.raises(TemplateError, match="not valid"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "\ud800", 5])
def test_a_template_that_python_cannot_compile_is_refused_as_well(source):
    with pytest.raises(TemplateError, match="not valid"):
        ChatTemplate(source, {})


def test_a_final_message_that_the_template_trims_is_continued_without_its_space():
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    final = {"role": "assistant", "content": "Once upon  "}
    assert render(source, USER, final, add_generation_prompt=False, continue_final_message=True) == "[Hello!][Once upon"


@pytest.mark.parametrize("source", ["nothing of the content", "{% for m in messages %}{{ m.content[0] }}{% endfor %}"])
def test_a_final_message_that_is_not_rendered_cannot_be_continued(source):
    with pytest.raises(TemplateError, match="continue_final_message"):
        render(source, USER, add_generation_prompt=False, continue_final_message=True)


def test_a_final_message_is_not_both_continued_and_answered():
    with pytest.raises(Unreadable, match="exclude"):
        render("{{ messages }}", USER, continue_final_message=True)


@pytest.mark.parametrize(
    "tools",
    [[], {}, "x", [1], [{"type": "custom", "function": {"name": "f"}}], [{"type": "function"}], [{"function": {}}]],
)
def test_tools_that_an_engine_refuses_are_left_to_it(tools):
    with pytest.raises(Unreadable):
        parse_tools(json.dumps(tools).encode())


def test_the_billing_header_goes_from_the_texts_of_system_messages_alone():
    parts = [
        {"type": "thinking", "thinking": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "x-anthropic-billing-header: 2\nrest", "x": 1},
        "x-anthropic-billing-header: 3\nmore",
        "x-anthropic-billing-header: 4",
    ]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render(source, {"role": "system", "content": parts}) == "x-anthropic-billing-header: 1\nrest\nmore"


def test_tools_of_a_developer_message_come_in_vllms_order():
    function = {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f", "x": 3, "description": "d"}
    message = {"role": "developer", "content": "", "tools": [{"type": "function", "function": function, "y": 1}]}
    assert render("{{ messages[0].tools | tojson if 'developer' else '' }}", message) == (
        '[{"function": {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}, "strict": true, "x": 3}, '
        '"type": "function", "y": 1}]'
    )


@pytest.mark.parametrize("tools", ["x", [1], [{"function": 1}], [{"function": {"name": "f", "description": None}}]])
def test_tools_of_a_developer_message_that_vllm_may_order_otherwise_are_left_to_it(tools):
    with pytest.raises(Unreadable):
        render("{{ messages }}", {"role": "developer", "content": "", "tools": tools})


def test_continuing_the_final_message_is_no_variable_of_the_template():
    variables = {"continue_final_message": True, "add_generation_prompt": False}
    source = "{{ continue_final_message | default('none') }}{{ add_generation_prompt }}"
    assert render(source, USER, chat_template_kwargs=variables) == "noneTrue"


def test_tools_keep_what_vllm_keeps_in_its_order():
    tool = {
        "defer_loading": True,
        "function": {"parameters": {}, "x": 1, "strict": False, "name": "f"},
        "type": "function",
    }
    assert json.dumps(parse_tools(json.dumps([tool]).encode())) == json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": None,
                    "parameters": {},
                    "strict": False,
                    "defer_loading": True,
                },
                "defer_loading": True,
            }
        ]
    )


@pytest.mark.parametrize("name", ["chat_template", "tools", "messages", "tokenize", "padding"])
def test_template_variables_that_are_no_variables_are_left_to_the_engine(name):
    with pytest.raises(Unreadable):
        template_variables(chat_request({"messages": [USER], "chat_template_kwargs": {name: 1}}))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "hologram", "hologram": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [5]},
        {"role": "assistant", "tool_calls": "f()"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "assistant", "content": "x", "reasoning": 5},
        {"role": "tool", "content": "x", "tool_call_id": 5},
    ],
)
def test_messages_that_an_engine_may_refuse_are_left_to_it(message):
    with pytest.raises(Unreadable):
        outline(chat_request({"messages": [message]}).messages, parts=False)


def test_media_are_noticed_where_they_are_first():
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
    assert outline(chat_request({"messages": [USER, picture, picture]}).messages, parts=True).first_media == 1
    by_uuid = {"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "cat"}]}
    assert outline(chat_request({"messages": [by_uuid]}).messages, parts=False).first_media == 0
