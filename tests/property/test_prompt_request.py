"""No body makes the parser fail otherwise than it should."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.prompt.conversation import Unreadable, outline
from gateway.prompt.growth import Conversations
from gateway.prompt.parsing import parse_request
from gateway.prompt.request import ChatRequest
from tests.prompt_rig import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, api_bodies

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    "model messages prompt stream stream_options n max_tokens max_completion_tokens tools chat_template_kwargs "
    "documents cache_salt session_id user suffix add_generation_prompt add_special_tokens reasoning_effort "
    "system thinking output_config metadata input instructions reasoning previous_response_id".split()
)
message_fields = st.sampled_from(
    "role content tool_calls tool_call_id name reasoning reasoning_content task tools "
    "type text input status call_id arguments output summary".split()
)
messages = st.lists(st.dictionaries(message_fields, json_values, max_size=4) | json_values, max_size=3)
bodies = st.dictionaries(fields, json_values | messages, max_size=6)
paths = st.sampled_from([CHAT, COMPLETIONS, MESSAGES, RESPONSES])
examples = [*BODIES.values(), *api_bodies("messages").values(), *api_bodies("responses").values()]

KNOWN = Conversations(20_000)


def parse(path: str, body: bytes) -> None:
    try:
        request = parse_request(path, body)
    except BadRequest as error:
        assert error.status == 400
        assert error.message
        return
    assert request.max_tokens is None or 0 <= request.max_tokens < 2**31
    assert request.model is None or isinstance(request.model, str)
    assert request.opaque in (True, False)
    if isinstance(request, ChatRequest):
        long = parse_request(path, body.ljust(8192), KNOWN)  # read message by message, where it is a chat
        assert isinstance(long, ChatRequest)
        assert values(long) == values(request)
        for parts in (True, False):
            with suppress(Unreadable):
                outline(request.messages, parts)


def values(request: ChatRequest) -> str:
    """Return all that a request says, as text, because NaN is not equal to itself."""
    fields = [getattr(request, field) for field in request.__struct_fields__ if field not in ("body", "conversation")]
    return repr([bytes(field) if isinstance(field, msgspec.Raw) else field for field in fields])


@given(path=paths, body=bodies)
@example(path=CHAT, body={"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]})
def test_any_object_is_read_refused_or_left_to_the_engine(path, body):
    parse(path, json.dumps(body).encode())


@given(path=paths, body=st.sampled_from(examples), data=st.data())
def test_damaged_bodies_are_read_refused_or_left_to_the_engine(path, body, data):
    raw = bytearray(json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    parse(path, bytes(raw))
