"""Whatever workers stream and clients ask, reading it for resumption raises nothing, and joins text without a seam."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.prompt.parsing import parse_request
from gateway.relay.partial import RESUMABLE_PATHS, Joint, PartialAnswer, continued_body, refusal_of
from gateway.relay.sse import data_of

IDENTITY = {"id": "first", "created": 1, "model": "m"}
SIMPLE: list[Any] = [None, True, False, 0, 1, -1, 2.5, "", "none", "x", [], {}]
NESTED: list[Any] = [[1], [[]], [{}], ["x"], *({"content": one} for one in ("y", 1, [1])), {"prompt_tokens": "1"}]
VALUES = st.sampled_from([*SIMPLE, *NESTED])
CHUNKS = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "usage": VALUES | st.fixed_dictionaries({"prompt_tokens": VALUES, "completion_tokens": VALUES}),
        "choices": VALUES | st.lists(st.fixed_dictionaries({}, optional={"delta": VALUES, "text": VALUES}), max_size=2),
    },
)
EVENTS = st.binary(max_size=40) | CHUNKS.map(lambda chunk: b"data: " + msgspec.json.encode(chunk))
LIMITS = ("max_tokens", "min_tokens", "max_completion_tokens")
FIELDS = ("messages", "prompt", *LIMITS, "continue_final_message", "n", "stop")
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, VALUES)) | st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": VALUES}), max_size=2)},
    optional=dict.fromkeys(FIELDS[2:], VALUES),
)


@given(events=st.lists(EVENTS, max_size=4))
def test_no_event_troubles_whoever_reads_or_rewrites_it(events: list[bytes]) -> None:
    partial, joint = PartialAnswer(100), Joint(IDENTITY, " \n", None, 3)
    for event in events:
        partial.note(event)
        partial.note(joint.rewrite(event))
    assert len(partial.text) <= 100


@given(path=st.sampled_from(sorted(RESUMABLE_PATHS)), fields=BODIES)
def test_every_request_that_may_pass_is_refused_or_can_be_continued(path: str, fields: dict[str, Any]) -> None:
    body = msgspec.json.encode(fields)
    try:
        parse_request(path, body)
    except BadRequest:
        return
    if refusal_of(path, body, "text") is None:
        continued = msgspec.json.decode(continued_body(path, body, "text", 3))
        assert "text" in str(continued.get("messages") or continued["prompt"])


@given(text=st.text(st.sampled_from("ab \n"), max_size=12), cut=st.integers(0, 12), pieces=st.lists(st.integers(1, 4)))
def test_a_text_cut_anywhere_is_joined_without_a_seam(text: str, cut: int, pieces: list[int]) -> None:
    sent = text[:cut]
    asked = sent.rstrip()
    joint = Joint(IDENTITY, sent[len(asked) :], None, 0)
    rest, seen = text[len(asked) :], sent
    for size in [*pieces, len(rest)]:  # the engine goes on from where it was asked to
        piece, rest = rest[:size], rest[size:]
        event = joint.rewrite(b"data: " + msgspec.json.encode({"id": "second", "choices": [{"text": piece}]}))
        if event:
            chunk = msgspec.json.decode(data_of(event))
            assert chunk["id"] == "first"
            seen += chunk["choices"][0]["text"]
    assert seen == text
