"""Plans: which conversations one serves, and that it never serves one that the template would render otherwise."""

from __future__ import annotations

import pytest

from gateway.prompt import tracing
from gateway.prompt.chat import Chat
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tracing import PlanDrafter
from tests.prompt_rig import BODIES, SPECIAL_TOKENS, TEMPLATE_NAMES, chat_of, template


def chat(*texts: str) -> Chat:
    roles = ["user", "assistant"] * len(texts)
    return Chat(roles[: len(texts)], list(texts))


def draft(source: str, *texts: str):
    chosen = ChatTemplate("{% for message in messages %}" + source + "{% endfor %}", SPECIAL_TOKENS)
    example = chat(*texts)
    return PlanDrafter(chosen).draft(example, chosen.render(example))


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize("body", ["turns", "turns without system", "tools", "odd tools", "effort"])
def test_ordinary_chats_of_the_common_families_have_plans(name, body):
    example = chat_of(BODIES[body], template(name))
    plan = PlanDrafter(template(name)).draft(example, template(name).render(example))
    assert plan is not None
    other = Chat(**{field: getattr(example, field) for field in Chat.__slots__})
    other.leaves = [f"Another text, number {number}." for number, _ in enumerate(example.leaves)]
    assert plan.serves(other.leaves)
    assert plan.render(other.leaves) == template(name).render(other)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "harmony", "deepseek"])
def test_agents_turns_have_plans_too(name):
    example = chat_of(BODIES["tool call"], template(name))
    assert PlanDrafter(template(name)).draft(example, template(name).render(example)) is not None


def test_a_plan_serves_only_where_the_templates_questions_have_the_same_answers():
    plan = draft(
        "{{ message.content.split('</think>')[-1] if '</think>' in message.content else message.content }}", "x"
    )
    assert plan.serves(["another"])
    assert not plan.serves(["a</think>b"])
    thoughtful = draft("{{ message.content.split('</think>')[-1] if '</think>' in message.content }}", "a</think>b")
    assert thoughtful.serves(["x</think>y"])
    assert thoughtful.render(["x</think>y"]) == "y"
    assert not thoughtful.serves(["x</think>y</think>z"])  # split into another number of parts
    assert not thoughtful.serves(["x"])


def test_a_plan_ends_with_the_day(monkeypatch):
    monkeypatch.setattr(tracing, "strftime_now", lambda pattern: "Monday")
    chosen = ChatTemplate("{{ messages[0].content }} {{ strftime_now('%A') }}", {})
    drafter = PlanDrafter(chosen)
    plan = drafter.draft(chat("It is"), "It is Monday")
    assert plan.serves(["It may be"])
    monkeypatch.setattr(tracing, "strftime_now", lambda pattern: "Tuesday")
    assert not plan.serves(["It is"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'yes' if message.content }}",
        "{{ 'yes' if not message.content.strip() }}",
        "{{ 'yes' if message.content == 'x' }}",
        "{{ 'yes' if 'x' == message.content }}",
        "{{ 'yes' if message.content != 'x' }}",
        "{{ 'yes' if message.content in ['x', 'z'] }}",
        "{{ 'yes' if message.content in 'xyz' }}",
        "{{ 'yes' if message.content is eq('x') }}",
        "{{ 'yes' if message.content is in(['x']) }}",
        "{{ 'yes' if message.content is upper }}",
        "{{ 'yes' if message.content < 'y' }}",
        "{{ 'yes' if message.content | length > 1 }}",
        "{{ 'yes' if message.content | length == 1 and message.content[0] == 'x' }}",
        "{{ 'yes' if (message.content ~ '!') == 'x!' }}",
        "{{ 'yes' if ('%s' % message.content) == 'x' }}",
        "{{ 'yes' if '{}'.format(message.content) == 'x' }}",
        "{{ 'yes' if [message.content] == ['x'] }}",
        "{{ 'yes' if {'a': message.content} == {'a': 'x'} }}",
        "{{ {'x': 'yes'}[message.content] }}",
        "{{ {'x': 'yes'}.get(message.content) }}",
        "{{ ({message.content: 'yes'})['x'] }}",
        "{{ 'yes' if messages | selectattr('content', 'equalto', 'x') | list }}",
        "{{ messages | map(attribute='content') | join(',') | replace('x', 'yes') }}",
        "{{ messages | map(attribute='content') | map('upper') | join }}",
        "{{ messages | groupby('content') | map('first') | join }}",
        "{{ [message.content, 'y'] | sort | first }}",
        "{{ [message.content, 'y'] | unique | list | length }}",
        "{{ [message.content, 'y'] | max }}",
        "{{ message.content | int }}",
        "{{ message.content | upper }}",
        "{{ message.content | replace('x', 'yes') }}",
        "{{ message.content.replace('x', 'yes') }}",
        "{{ message.content | tojson }}",
        "{{ message | tojson }}",
        "{{ message.content | list | join('-') }}",
        "{{ message.content | default('d', true) }}",
        "{{ message.content | indent }}",
        "{{ message.content[1:] }}",
        "{{ message.content.split() | length }}",
        "{{ message.content.split('x') | length }}",
        "{{ 'axb'.split(message.content or 'q') | length }}",
        "{{ 'axb'.replace(message.content, 'yes') }}",
        "{{ ','.join([message.content]) | upper }}",
        "{{ 'x'.join(['a', message.content]) }}",
        "{% for sign in message.content %}[{{ sign }}]{% endfor %}",
        "{% set text %}{{ message.content }}{% endset %}{{ 'yes' if text == 'x' }}{{ text | upper }}",
        "{% macro show(text) %}{{ text }}{% endmacro %}{{ 'yes' if show(message.content) == 'x' }}",
        "{% macro show() %}{{ caller() }}{% endmacro %}{% call show() %}{{ message.content }}{% endcall %}",
        "{% filter upper %}{{ message.content }}{% endfilter %}",
        "{{ 'yes' if loop.changed(message.content) }}",
        "{{ 'yes' if namespace(a=message.content).a == 'x' }}",
        "{{ message.content.missing }}{{ 'yes' if message.content.missing is defined }}",
        "{{ message.content.format(1) }}",
        "{{ 'yes' if message.content is string and message.content is not mapping and message.content is iterable }}",
    ],
)
def test_no_plan_is_wrong_about_another_text(source):
    texts = ["x", "y", "", " ", "xx", "z</z>", "{0}", "7", "X", '"', "a\n\nb"]
    chosen = ChatTemplate("{% for message in messages %}" + source + "{% endfor %}", SPECIAL_TOKENS)
    for example in texts:
        plan = draft(source, example, "y")
        for text in texts:
            if plan is not None and plan.serves([text, "y"]):
                assert plan.render([text, "y"]) == chosen.render(chat(text, "y"))


def test_arguments_of_calls_are_put_out_as_the_template_does():
    body = BODIES["tool call"]
    example = chat_of(body, template("qwen2"))
    plan = PlanDrafter(template("qwen2")).draft(example, template("qwen2").render(example))
    leaves = [leaf.replace('"city": "Zürich"', '"city": "Genève <b>"') for leaf in example.leaves]
    assert plan.serves(leaves)
    assert '{"city": "Genève <b>", "days": 3}' in plan.render(leaves)


@pytest.mark.parametrize(
    "use",
    [
        "{{ call.arguments }}",
        "{{ call.arguments.city }}",
        "{{ call.arguments['city'] }}",
        "{{ call.arguments | length }}",
        "{{ call.arguments | string }}",
        "{{ call.arguments | items | list }}",
        "{{ 'yes' if call.arguments }}",
        "{{ 'yes' if call.arguments == {} }}",
        "{% for name in call.arguments %}{{ name }}{% endfor %}",
    ],
)
def test_arguments_that_a_template_looks_into_have_no_plan(use):
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% set call = c.function %}"
        + use
        + "{% endfor %}{% endfor %}"
    )
    chosen = ChatTemplate(source, {})
    example = chat_of(BODIES["tool call"], chosen)
    assert PlanDrafter(chosen).draft(example, chosen.render(example)) is None
