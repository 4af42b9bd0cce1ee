"""A plan that serves a conversation renders it as the template does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.plan import Plan, whole
from gateway.prompt.template import ChatTemplate, TemplateError
from gateway.prompt.tracing import PlanDrafter
from tests.prompt_rig import SPECIAL_TOKENS, TEMPLATE_NAMES, chat_of, template

# Texts that templates look for, in all positions.
fragments = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "word",
        "Zürich",
        "<think>",
        "</think>",
        "<tool_response>",
        "</tool_response>",
        "\n\n",
        "\t",
        '"',
        "\\",
        "<|im_end|>",
        "x",
        "{{ x }}",
    ]
)
content = st.lists(fragments, max_size=6).map("".join)
arguments = st.sampled_from(["", "{}", '{"a": "é<b>", "c": [1, 2.0, null]}', '{"b": {"x": "y"}}', "[1]", "{bad", "17"])
names = st.sampled_from(["f", "get_weather", ""])


@st.composite
def tool_call(draw: st.DrawFn) -> dict[str, object]:
    function = {"name": draw(names), "arguments": draw(arguments)}
    return {"id": draw(st.sampled_from(["call_1", "x"])), "type": "function", "function": function}


@st.composite
def conversation(draw: st.DrawFn, shape: list[str]) -> dict[str, object]:
    """Return a chat body of the given shape, with drawn texts."""
    messages: list[dict[str, object]] = []
    for kind in shape:
        message: dict[str, object] = {"role": kind.removesuffix("+call"), "content": draw(content)}
        if kind == "tool":
            message["tool_call_id"] = draw(st.sampled_from(["call_1", "x"]))
        if kind.endswith("+call"):
            message["tool_calls"] = [draw(tool_call())]
        messages.append(message)
    return {"messages": messages}


shapes = st.one_of(
    st.builds(
        lambda system, turns: [*system, *(["user", "assistant"] * turns), "user"],
        st.sampled_from([[], ["system"]]),
        st.integers(0, 3),
    ),
    st.lists(st.sampled_from(["system", "user", "assistant", "assistant+call", "tool"]), min_size=1, max_size=6),
)


def check(source: ChatTemplate, drafter: PlanDrafter, bodies: list[dict[str, object]]) -> list[Plan]:
    """Draw up plans from each body, and hold them against the template on every one."""
    plans: list[Plan] = []
    for body in bodies:
        chat = chat_of(body, source)
        try:
            text = source.render(chat)
        except TemplateError:
            text = None
        for plan in plans:
            if plan.serves(chat.leaves):
                assert plan.render(chat.leaves) == text
                recipes = plan.recipes(lambda part: [at for at, sign in enumerate(part) if sign == "<"])
                assert "".join(whole(one if isinstance(one, str) else one(chat.leaves)) for one in recipes) == text
        if text is not None and (plan := drafter.draft(chat, text)) is not None:
            plans.append(plan)
    return plans


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_plans_of_the_common_families_are_right(name, data):
    shape = data.draw(shapes)
    bodies = data.draw(st.lists(conversation(shape), min_size=2, max_size=6))
    check(template(name), PlanDrafter(template(name)), bodies)


ATOMS = ["message.content", "message['content']", "message.role", "bos_token", "loop.index0", "none", "missing", "'x'"]
FILTERS = ["trim", "length", "upper", "string", "default('d')", "tojson", "list", "first", "replace('x', 'y')", "int"]
METHODS = ["strip()", "lstrip('x')", "rstrip()", "split('<think>')[0]", "split('</think>')[-1]", "split()", "upper()"]
METHODS += ["replace('x', 'word')", "startswith('x')", "count('x')", "missing"]
TESTS = [
    "string",
    "mapping",
    "none",
    "defined",
    "iterable",
    "true",
    "upper",
    "eq('x')",
    "in('xyz')",
    "in(['x', 'word'])",
]
OPERATORS = ["+", "~", "==", "!=", "in", "not in", "and", "or", "<"]
ITEMS = ["0", "-1", "1:", "'content'", "'missing'"]
OF_LISTS = ["first", "last", "tojson", "unique | list", "sort", "max", "reverse | list", "select | list"]


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return expressions made of smaller ones."""
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(OPERATORS), inner),
        st.builds("({} | {})".format, inner, st.sampled_from(FILTERS)),
        st.builds("({}.{})".format, inner, st.sampled_from(METHODS)),
        st.builds("({} is {})".format, inner, st.sampled_from(TESTS)),
        st.builds("({}[{}])".format, inner, st.sampled_from(ITEMS)),
        st.builds("([{}, message.content] | {})".format, inner, st.sampled_from(OF_LISTS)),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("(not {})".format, inner),
        st.builds("({{'x': 'found', 'word': 1}}[{}])".format, inner),
        st.builds("(['a', {}, 'x'] | join('-'))".format, inner),
        st.builds("('%s!' % {})".format, inner),
        st.builds("('{{}}!'.format({}))".format, inner),
    )


expressions = st.recursive(st.sampled_from(ATOMS), larger, max_leaves=5)
statements = st.one_of(
    st.builds("{{{{ {} }}}}".format, expressions),
    st.builds("{{% if {} %}}yes{{% else %}}no{{% endif %}}".format, expressions),
    st.builds("{{% set y = {} %}}{{{{ y }}}}".format, expressions),
    st.builds("{{% set y %}}({{{{ {} }}}}){{% endset %}}{{{{ y | trim }}}}{{{{ 'x' in y }}}}".format, expressions),
    st.builds("{{% for part in {} %}}[{{{{ part }}}}]{{% endfor %}}".format, expressions),
    st.builds("{{% set ns.seen = {} %}}{{{{ ns.seen }}}}".format, expressions),
    st.builds("{{{{ show({}) }}}}{{{{ show({}) | trim }}}}".format, expressions, expressions),
    st.builds("{{% filter upper %}}{{{{ {} }}}}{{% endfilter %}}".format, expressions),
    st.builds("{{{{ loop.changed({}) }}}}".format, expressions),
)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of expressions such as none[0]
@given(body=st.lists(statements, min_size=1, max_size=3).map("".join), data=st.data())
def test_plans_of_any_template_are_right(body, data):
    source = ChatTemplate(
        "{% macro show(it) %}<{{ it }}>{% endmacro %}{% set ns = namespace(seen='') %}"
        "{% for message in messages %}" + body + "{% endfor %}",
        SPECIAL_TOKENS,
    )
    bodies = data.draw(st.lists(conversation(["user", "assistant"]), min_size=2, max_size=5))
    check(source, PlanDrafter(source), bodies)
