"""A conversation read as the continuation of an earlier request is what it would be if it were read alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.growth import LEAST_BYTES, Conversation, Conversations
from gateway.prompt.parsing import parse_request
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.request import ChatRequest
from tests.prompt_rig import candidates, config, ids_of

PATH = "/v1/chat/completions"
LONG = {"role": "system", "content": "You are a careful engineer. " * (LEAST_BYTES // 20)}

texts = st.one_of(st.text(max_size=30), st.sampled_from(['"messages"', '{"model":"x"}', '{"role', "],[", "\\", "\n"]))
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": texts},
    optional={"tool_call_id": texts, "tool_calls": st.just([{"function": {"name": "f", "arguments": "{}"}}])},
)
messages |= messages.map(lambda message: dict(reversed(message.items()))) | st.just(
    {"role": "user", "content": [{"role": "user", "type": "text", "text": "x"}]}
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "model": texts,
        "stream": st.booleans(),
        "max_tokens": st.integers(1, 9),
        "tools": st.sampled_from([[], [{"type": "function"}], None]),
        "reasoning_effort": st.sampled_from(["low", None]),
        "messages": st.lists(messages, max_size=2),
        "unknown": st.lists(messages, max_size=2),
    },
)
separators = st.sampled_from([(",", ":"), (", ", ": ")])


def body(before: dict, chat: list, after: dict, separators: tuple[str, str]) -> bytes:
    """A chat whose fields come before and after its messages; one that is in both comes twice."""
    parts = [*before.items(), ("messages", chat), *after.items()]
    comma, colon = separators
    return (
        "{" + comma.join(f"{json.dumps(k)}{colon}{json.dumps(v, separators=separators)}" for k, v in parts) + "}"
    ).encode()


def seen(request: ChatRequest) -> dict:
    """All that a request says."""
    wanted = {name: getattr(request, name) for name in ChatRequest.__struct_fields__ if name != "conversation"}
    return {name: bytes(value) if isinstance(value, msgspec.Raw) else value for name, value in wanted.items()}


@given(
    before=fields,
    turns=st.lists(st.lists(messages, max_size=3), min_size=2, max_size=4),
    after=st.lists(fields, min_size=4, max_size=4),
    separators=separators,
)
def test_a_continued_chat_reads_as_it_would_alone(before, turns, after, separators):
    known = Conversations(10**7)
    chat: list = [LONG]
    for turn, fields_after in zip(turns, after, strict=False):
        chat = [*chat, *turn]
        raw = body(before, chat, fields_after, separators)
        try:
            alone = seen(parse_request(PATH, raw))
        except Exception as error:
            with pytest.raises(type(error)):
                parse_request(PATH, raw, known)
            continue
        assert seen(parse_request(PATH, raw, known)) == alone


# Beginnings that differ in one word, at their start, in between or at their end, where little else tells them apart.
ALIKE = [
    [{"role": "system", "content": text}, *others]
    for text in (
        LONG["content"],
        LONG["content"].replace("careful", "Careful", 1),
        LONG["content"] + "Rome.",
        LONG["content"] + "Oslo.",
        LONG["content"] * 5,
        LONG["content"] * 2 + "Rome." + LONG["content"] * 2,
        LONG["content"] * 2 + "Oslo." + LONG["content"] * 2,
    )
    for others in ([], [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello!"}])
]
TOOLS = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"role": {"a": n}}}} for n in range(60)]
ORDERS = [
    ({"model": "tiny", "tools": TOOLS}, {}),
    ({}, {"model": "tiny", "tools": TOOLS}),
    ({"model": "tiny"}, {"stream": True}),
    ({}, {"model": "tiny"}),
]
said = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(["yes", "no!", "go on " * 400])}
) | messages.filter(lambda message: "tool_calls" not in message)


@st.composite
def traffic(draw: st.DrawFn) -> list[bytes]:
    """Return bodies of chats that begin alike, grow, part from each other and come again."""
    chats = [draw(st.sampled_from(ALIKE)) for _ in range(3)]
    orders = draw(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=2))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    bodies = []
    for _ in range(draw(st.integers(4, 20))):
        chat = draw(st.sampled_from(chats))
        chat = chat[: draw(st.integers(1, len(chat)))] if draw(st.booleans()) else chat
        chat = [*chat, *draw(st.lists(said, max_size=3))]
        chats.append(chat)
        before, after = draw(st.sampled_from(orders))
        bodies.append(body(before, chat, after, separators))
    return bodies


@given(bodies=traffic(), max_bytes=st.sampled_from([10**6, 10**8]))
def test_of_all_kept_conversations_the_longest_is_found_and_reads_as_it_would_alone(bodies, max_bytes):
    known = Conversations(max_bytes)
    for raw in bodies:
        found = known._find(raw)
        if max_bytes == 10**8:  # nothing was given up
            kept = [entry for entry in known._known.entries.values() if isinstance(entry, Conversation)]
            lengths = [len(entry.prefix) for entry in kept if raw.startswith(entry.prefix)]
            assert (len(found.prefix) if found else 0) == max(lengths, default=0)
        assert seen(parse_request(PATH, raw, known)) == seen(parse_request(PATH, raw))
        assert sum(entry.cost for entry in known._known.entries.values()) == known._known.bytes <= max_bytes


@pytest.fixture(scope="module")
def pipeline() -> Iterator[PromptPipeline]:
    pipeline = PromptPipeline(config())
    yield pipeline
    pipeline._executor.shutdown()


@given(bodies=traffic())
async def test_the_prompt_of_a_known_conversation_is_the_one_it_would_be_alone(pipeline, bodies):
    for raw in bodies:
        prompt, alone = [
            await pipeline.prompt(request, candidates())
            for request in (pipeline.parse(PATH, raw), parse_request(PATH, raw))
        ]
        assert (ids_of(prompt), prompt.chunks, prompt.tokens) == (ids_of(alone), alone.chunks, alone.tokens)


@given(cut=st.integers(1, 60), other=st.sampled_from([b"}", b"]", b",", b'"', b"{", b"\\", b"x"]))
def test_a_broken_continuation_is_refused_as_it_would_be_alone(cut, other):
    known = Conversations(10**7)
    first = body({"model": "m"}, [LONG, {"role": "user", "content": "a"}], {"stream": True}, (",", ":"))
    parse_request(PATH, first, known)
    broken = first[:-cut] + other + first[len(first) - cut + 1 :]
    try:
        alone = seen(parse_request(PATH, broken))
    except Exception as error:
        with pytest.raises(type(error)):
            parse_request(PATH, broken, known)
    else:
        assert seen(parse_request(PATH, broken, known)) == alone


def test_the_next_request_of_a_conversation_shares_the_messages_of_the_last():
    known = Conversations(10**7)
    chat = [LONG, {"role": "user", "content": "first"}]
    first = parse_request(PATH, body({"model": "m"}, chat, {"stream": True}, (",", ":")), known)
    chat += [{"role": "assistant", "content": "answer", "tool_calls": []}, {"role": "user", "content": "second"}]
    second = parse_request(PATH, body({"model": "m"}, chat, {"max_tokens": 3}, (",", ":")), known)
    assert isinstance(first, ChatRequest)
    assert isinstance(second, ChatRequest)
    assert second.conversation is first.conversation is not None
    assert second.messages[0] is first.messages[0]
    assert (second.model, second.stream, second.max_tokens) == ("m", None, 3)
    assert [message.content for message in second.messages[1:]] == ["first", "answer", "second"]


def test_messages_that_stand_in_another_field_too_are_not_taken_for_the_chat():
    known = Conversations(10**7)
    chat = [LONG, {"role": "user", "content": "a"}]
    for history in (chat, [*chat, {"role": "user", "content": "b"}]):
        request = parse_request(PATH, body({}, chat, {"history": history}, (",", ":")), known)
        assert isinstance(request, ChatRequest)
        assert [message.content for message in request.messages] == [LONG["content"], "a"]


def test_messages_that_come_again_in_a_continued_chat_count_as_they_would_alone():
    known = Conversations(10**7)
    chat = [LONG, {"role": "user", "content": "a"}]
    parse_request(PATH, body({}, chat, {}, (",", ":")), known)
    raw = body({}, chat, {"messages": [{"role": "user", "content": "instead " * 9}]}, (",", ":"))
    assert seen(parse_request(PATH, raw, known)) == seen(parse_request(PATH, raw))


def test_what_comes_after_the_messages_may_hold_anything():
    known = Conversations(10**7)
    chat = [LONG, {"role": "user", "content": "a"}]
    after = {"stop": ["\n"], "tools": [{"description": 'Gives a "model"\n', "parameters": {"model": {"messages": 1}}}]}
    first = parse_request(PATH, body({"model": "m"}, chat, after, (",", ":")), known)
    raw = body({"model": "m"}, [*chat, *chat[1:]], after, (",", ":"))
    second = parse_request(PATH, raw, known)
    assert isinstance(first, ChatRequest)
    assert isinstance(second, ChatRequest)
    assert second.messages[0] is first.messages[0]
    assert seen(second) == seen(parse_request(PATH, raw))


def test_a_field_that_comes_twice_counts_the_second_time_however_its_name_is_written():
    for raw in (body({"model": "m"}, [LONG, *[{"role": "user", "content": "a"}] * n], {}, (",", ":")) for n in (1, 2)):
        known = Conversations(10**7)
        parse_request(PATH, raw, known)
        other = raw[:-1] + b',"\\u006dodel":"other"}'
        request = parse_request(PATH, other, known)
        assert request.model == "other"
        assert seen(request) == seen(parse_request(PATH, other))


def test_a_conversation_is_known_however_its_messages_are_written():
    content_first = {"content": "a", "role": "user"}
    for others in (
        [content_first],
        [{"role": "user", "content": "a"}, content_first, content_first],
        [{"role": "user", "content": [{"role": "x", "type": "text"}]}],
        [{"role": "user", "content": [{"type": "text"}, {"role": "x", "type": "text"}]}],
    ):
        known = Conversations(10**7)
        raw = body({"model": "m"}, [LONG, *others], {"tools": [{"a": {}}, {"role": {}}]}, (", ", ": "))
        first, second = parse_request(PATH, raw, known), parse_request(PATH, raw, known)
        assert isinstance(first, ChatRequest)
        assert isinstance(second, ChatRequest)
        assert second.conversation is first.conversation is not None
        assert second.conversation.messages == first.messages[:-1]
        assert seen(first) == seen(second) == seen(parse_request(PATH, raw))


def test_a_client_cannot_write_what_is_known_of_its_conversation():
    short = b'{"messages":[{"role":"user","content":"hi"}]," ":{"reading":1}}'
    long = short.replace(b'"hi"', b'"' + b"hi" * LEAST_BYTES + b'"')
    for raw in (short, long):
        request = parse_request(PATH, raw, Conversations(10**7))
        assert isinstance(request, ChatRequest)
        assert request.conversation is None or not isinstance(request.conversation, dict)
