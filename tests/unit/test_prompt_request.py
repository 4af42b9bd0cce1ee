"""What is read from request bodies, what is refused, and what is left to the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.prompt.growth import Conversations
from gateway.prompt.parsing import parse_request
from gateway.prompt.request import MAX_OUTPUT_TOKENS, ChatRequest, CompletionRequest
from tests.prompt_rig import CHAT, COMPLETIONS, HELLO


def parse(path: str, **fields: Any) -> Any:
    return parse_request(path, json.dumps(fields).encode())


def test_a_chat_is_read():
    request = parse(CHAT, model="m", messages=HELLO, stream=True, n=2, max_tokens=5, cache_salt="s", unknown=[1])
    assert isinstance(request, ChatRequest)
    assert (request.kind, request.model, request.stream, request.n) == ("chat", "m", True, 2)
    assert (request.max_tokens, request.cache_salt, request.opaque) == (5, "s", False)
    assert (request.messages[0].role, request.messages[0].content) == ("user", "Hello!")


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_a_completion_is_read_whatever_the_form_of_its_prompt(prompt):
    request = parse(COMPLETIONS, model="m", prompt=prompt)
    assert isinstance(request, CompletionRequest)
    assert (request.kind, request.prompt, request.opaque) == ("completions", prompt, False)


def test_the_newer_limit_on_output_tokens_wins():
    assert parse(CHAT, messages=HELLO, max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert parse(CHAT, messages=HELLO, max_completion_tokens=7).max_tokens == 7
    assert parse(CHAT, messages=HELLO).max_tokens is None


def test_limits_are_bounded_to_what_arithmetic_can_bear():
    assert parse(CHAT, messages=HELLO, max_tokens=10**400).max_tokens == MAX_OUTPUT_TOKENS
    assert parse(CHAT, messages=HELLO, max_tokens=-1).max_tokens == 0


def test_a_session_is_its_id_or_else_the_user():
    assert parse(CHAT, messages=HELLO, session_id="s", user="u").session == "s"
    assert parse(CHAT, messages=HELLO, user="u").session == "u"
    assert parse(CHAT, messages=HELLO).session is None


def test_usage_is_wanted_only_when_asked_for():
    assert parse(CHAT, messages=HELLO, stream_options={"include_usage": True}).include_usage
    assert not parse(CHAT, messages=HELLO, stream_options={"include_usage": None}).include_usage
    assert not parse(CHAT, messages=HELLO, stream_options=None).include_usage


def test_a_missing_model_is_none():
    assert parse(CHAT, messages=HELLO).model is None


NULLABLE = (
    "model stream stream_options n max_tokens cache_salt session_id user truncate_prompt_tokens max_completion_tokens "
    "tools chat_template chat_template_kwargs documents reasoning_effort suffix prompt_embeds kv_transfer_params"
).split()


@pytest.mark.parametrize("name", NULLABLE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nulls_are_as_absent(path, name):
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello!"}
    request, without = parse(path, **body, **{name: None}), parse(path, **body)
    assert not request.opaque
    assert request.model is None
    assert (request.max_tokens, request.session, request.include_usage) == (None, None, False)
    assert (request.stream, request.n, request.cache_salt) == (without.stream, without.n, without.cache_salt)


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "add_special_tokens"])
def test_a_null_that_the_engine_refuses_is_left_to_it(name):
    assert parse(CHAT, messages=HELLO, **{name: None}).opaque


def test_a_chat_with_token_ids_that_the_engine_runs_in_place_of_its_messages_is_left_to_it():
    assert parse(CHAT, messages=HELLO, kv_transfer_params={"prompt_token_ids": [1, 2]}).opaque
    for other in ({"do_remote_decode": True}, {"prompt_token_ids": None}, None):
        assert not parse(CHAT, messages=HELLO, kv_transfer_params=other).opaque


def test_what_is_kept_of_a_request_that_is_left_to_the_engine():
    kept = {"model": "m", "stream": True, "n": 2, "cache_salt": "s", "session_id": "i", "user": "u"}
    request = parse(CHAT, messages=5 * [{"content": "no role"}], **kept)
    assert request.opaque
    assert {name: getattr(request, name) for name in kept} == kept


def test_a_null_limit_leaves_the_older_one_to_count():
    unreadable = {"role": "user", "content": 5}
    for messages in (HELLO, [unreadable]):
        assert parse(CHAT, messages=messages, max_completion_tokens=None, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "empty", None),
        (b"[]", "must be a JSON object, not array", None),
        (b"null", "not null", None),
        (b"17", "not number", None),
        (b'{"model": "m"', "not valid JSON", None),
        (b'{"model": "m"} x', "not valid JSON", None),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "UTF-8", None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate", None),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply", None),
        (b"[" * 100_000, "nested too deeply", None),
        (b'{"model": 1}', "'model' must be of type string, not number", "model"),
        (b'{"model": ["m"]}', "not array", "model"),
        (b'{"messages": "Hello!"}', "'messages' must be of type array, not string", "messages"),
        (b'{"messages": {"role": "user"}}', "not object", "messages"),
        (b'{"messages": [{"role": "user"}, 3]}', "messages[1]", "messages[1]"),
        (b'{"stream": {}}', "'stream'", "stream"),
        (b'{"max_tokens": []}', "'max_tokens' must be of type number or string, not array", "max_tokens"),
        (b'{"max_tokens": true, "messages": 1}', "'messages'", "messages"),
        (b'{"n": {}}', "'n'", "n"),
    ],
)
def test_what_no_engine_could_read_is_refused(body, message, param):
    with pytest.raises(BadRequest) as caught:
        parse_request(CHAT, body)
    assert message in caught.value.message
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize("prompt", [5, True, {"text": "x"}])
def test_a_prompt_that_is_no_prompt_is_refused(prompt):
    with pytest.raises(BadRequest, match="'prompt' must be of type string or array"):
        parse(COMPLETIONS, prompt=prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": 7, "content": "x"}]},
        {"messages": HELLO, "max_tokens": "16"},
        {"messages": HELLO, "max_tokens": 16.0},
        {"messages": HELLO, "stream": "true"},
        {"messages": HELLO, "add_generation_prompt": "no"},
        {"messages": HELLO, "truncate_prompt_tokens": 10},
        {"messages": HELLO, "cache_salt": 5},
        {},
    ],
)
def test_what_an_engine_may_read_is_left_to_it(fields):
    request = parse(CHAT, model="m", **fields)
    assert request.opaque
    assert request.model == "m"


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": ""}, {"prompt": []}, {"prompt": "x", "suffix": "y"}, {"prompt_embeds": "AA=="}, {"prompt": None}],
)
def test_completions_without_a_readable_prompt_are_left_to_the_engine(fields):
    assert parse(COMPLETIONS, model="m", **fields).opaque


def test_json_that_only_the_engines_parser_accepts_is_forwarded():
    request = parse_request(
        CHAT, b'{"model": "m", "temperature": NaN, "messages": [{"role": "user"}], "max_tokens": 5}'
    )
    assert (request.opaque, request.model, request.max_tokens) == (True, "m", 5)
    long = b'{"temperature": NaN, "messages": [{"role": "user", "content": "%b"}]}' % (b"x" * 2**21)
    assert parse_request(CHAT, long).opaque


def test_json_of_very_many_values_must_be_what_the_fast_parser_accepts():
    with pytest.raises(BadRequest, match="not valid JSON"):
        parse_request(CHAT, b'{"messages": [], "temperature": NaN, "x": [%b]}' % b",".join([b"1"] * 200_000))


def test_the_last_of_equal_keys_counts_as_it_does_in_the_engine():
    assert parse_request(CHAT, b'{"model": "a", "model": "b", "messages": []}').model == "b"


def test_the_length_of_the_body_is_kept():
    assert parse_request(CHAT, b'{"messages": [], "": 5}').body == b'{"messages": [], "": 5}'


def test_messages_of_long_chats_are_read_once_but_for_the_last():
    long = {"role": "user", "content": "word " * 2000}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    body = json.dumps({"model": "m", "messages": [long, parts]}).encode()
    known = Conversations(2**20)
    first, second = (parse_request(CHAT, body, known) for _ in range(2))
    assert first.messages == second.messages
    assert first.messages == parse_request(CHAT, body).messages
    assert first.messages[0] is second.messages[0]
    assert first.messages[1] is not second.messages[1]


def test_a_long_chat_that_breaks_off_after_known_messages_is_refused():
    messages = [{"role": "user", "content": "word " * 2000}, {"role": "user", "content": "x"}]
    whole = json.dumps({"model": "m", "messages": messages}).encode()
    known = Conversations(2**20)
    parse_request(CHAT, whole, known)
    with pytest.raises(BadRequest, match="not valid JSON"):
        parse_request(CHAT, whole[: whole.rindex(b"{")] + b"]}", known)
