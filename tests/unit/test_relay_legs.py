"""The two requests that one becomes, field by field, and what is left out of them."""

from __future__ import annotations

import json

import msgspec
import pytest

from gateway.errors import BadRequest
from gateway.relay import legs
from tests.golden import DATA

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOLDEN = json.loads((DATA / "vllm-0.32" / "pd_nixl.json").read_text())


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_the_legs_of_a_real_hand_over_are_ours(kind: str) -> None:
    captured = GOLDEN[kind]
    sent = {name: value for name, value in captured["prefill_request"].items() if name != "kv_transfer_params"}
    limits = {name: 12 for name in ("max_tokens", "max_completion_tokens") if name in sent}
    fields = legs.read_fields(msgspec.json.encode(sent | limits | {"stream": True}), keep_params=False)
    assert msgspec.json.decode(legs.nixl_prefill(fields)) == captured["prefill_request"]
    answered = captured["prefill_response"]
    answer = legs.PrefillAnswer(legs.read_params(msgspec.json.encode(answered)), 0)
    assert answer.hands_over and answer.tells_cached_tokens
    second = msgspec.json.decode(legs.nixl_decode(fields, answer.params))
    assert second == sent | limits | {"stream": True, "kv_transfer_params": answered["kv_transfer_params"]}


@pytest.mark.parametrize(
    "body", [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}', b"data: {}", b""]
)
def test_an_answer_without_parameters_hands_nothing_over(body: bytes) -> None:
    assert not legs.PrefillAnswer(legs.read_params(body), None).hands_over


def test_what_gateways_set_is_not_taken_from_clients() -> None:
    body = b'{"a":1,"bootstrap_host":"x","bootstrap_room":[1],"kv_transfer_param\\u0073":{"remote_host":"x"}}'
    assert set(legs.read_fields(body, keep_params=False)) == {"a"}
    assert set(legs.read_fields(body, keep_params=True)) == {"a", "kv_transfer_params"}


def test_a_body_that_only_engines_can_read_is_stripped_too() -> None:
    fields = legs.read_fields(b'{"temperature":NaN,"bootstrap_host":"x"}', keep_params=False)
    assert legs.write_fields(fields) == b'{"temperature":NaN}'


@pytest.mark.parametrize("before", [b"1", b"NaN"])
def test_a_body_nested_too_deeply_is_the_clients_mistake(before: bytes) -> None:
    body = b'{"a":%b,"b":%b%b}' % (before, b"[" * 10_000, b"]" * 10_000)
    with pytest.raises(BadRequest, match="nested too deeply"):
        legs.read_fields(body, keep_params=False)
    assert legs.sequences("/v1/completions", body) == 0


def test_token_ids_of_our_own_go_to_both_workers() -> None:
    fields = legs.read_fields(b'{"kv_transfer_params":{"prompt_token_ids":[1,2]}}', keep_params=True)
    first = msgspec.json.decode(legs.nixl_prefill(fields))["kv_transfer_params"]
    second = msgspec.json.decode(legs.nixl_decode(fields, b'{"remote_port":1}'))["kv_transfer_params"]
    assert first["prompt_token_ids"] == [1, 2] and first["do_remote_decode"]
    assert second == {"prompt_token_ids": [1, 2], "remote_port": 1}


def test_mooncakes_legs_share_a_transfer() -> None:
    fields = legs.read_fields(b'{"stream":true,"max_tokens":9}', keep_params=False)
    first, second = map(msgspec.json.decode, legs.mooncake_bodies(fields, "x1", "e1", "http://p:8998"))
    assert first == {
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x1"},
    }
    assert second == {
        "stream": True,
        "max_tokens": 9,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "x1",
            "remote_engine_id": "e1",
            "remote_bootstrap_addr": "http://p:8998",
        },
    }


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (CHAT, b'{"messages":[]}', 1),
        (CHAT, b'{"n":3}', 3),
        (TEXT, b'{"prompt":[1,2,3]}', 1),
        (TEXT, b'{"prompt":["a","b"],"n":2}', 4),
        (TEXT, b'{"prompt":[[1],[2]]}', 2),
        (TEXT, b'{"prompt":"a","echo":true}', 0),
        (TEXT, b'{"prompt":"a","prompt_logprobs":0}', 0),
        (TEXT, b'{"prompt":"a","best_of":2}', 0),
        (TEXT, b'{"prompt":"a","use_beam_search":true}', 0),
        (CHAT, b'{"n":"2"}', 0),
        (CHAT, b'{"n":-1}', 0),
        (CHAT, b'{"n":1024}', 1024),
        (CHAT, b'{"n":1025}', 0),
        (TEXT, b'{"prompt":["a","b"],"n":1000000000}', 0),
        ("/v1/responses", b'{"input":"a"}', 0),
        (CHAT, b'{"temperature":NaN}', 0),
    ],
)
def test_how_many_sequences_are_asked_for(path: str, body: bytes, count: int) -> None:
    assert legs.sequences(path, body) == count
