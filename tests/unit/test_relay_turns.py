"""What is known of KV that decode workers keep between two turns of a conversation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.config import WorkerConfig
from gateway.fleet.registry import Worker
from gateway.relay.turns import ParamsReader, Turns
from tests.fleets import CHUNK, make_request

BLOCK = 32
PROMPT = 700  # two whole chunks and a bit; the engine has computed 19 more
PARAMS: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [list(range(10, 33))],
    "remote_engine_id": "e",
    "remote_num_tokens": PROMPT + 19,
}


def make_worker(block_size: int = BLOCK) -> Worker:
    worker = Worker.from_config(WorkerConfig(url="http://d:1"))
    worker.block_size = block_size
    return worker


def kept(turns: Turns, params: dict[str, Any] = PARAMS, worker: Worker | None = None, counted: int = PROMPT) -> bool:
    request = make_request(PROMPT)
    turns.keep(request, counted, worker or make_worker(), params, 0.0)
    return turns.find(request, 0.0) is not None


def test_only_whole_chunks_that_both_prompts_share_are_pulled():
    turns = Turns(60.0)
    assert kept(turns)
    turn = turns.find(make_request(5_000), 1.0)
    assert turn is not None and turn.tokens == 2 * CHUNK
    blocks = list(range(10, 10 + 2 * CHUNK // BLOCK))
    assert msgspec.json.decode(turn.params) == PARAMS | {"remote_block_ids": [blocks], "remote_num_tokens": 2 * CHUNK}
    assert turns.find(make_request(5_000, conversation=1), 1.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_decode": False},
        {"remote_block_ids": None},
        {"remote_block_ids": [[1], [2]]},  # two KV cache groups
        {"remote_block_ids": [[1, 2]]},  # blocks of several ranks
        {"remote_block_ids": ["blocks"]},
        {"remote_num_tokens": "many"},
        {"remote_num_tokens": 100},
    ],
)
def test_parameters_that_cannot_be_cut_are_not_kept(change: dict[str, Any]):
    assert not kept(Turns(60.0), PARAMS | change)


@pytest.mark.parametrize("block_size", [0, 96])
def test_nothing_is_kept_where_chunks_are_no_whole_blocks(block_size: int):
    assert not kept(Turns(60.0), worker=make_worker(block_size))


def test_nothing_is_kept_where_the_engine_has_counted_other_tokens():
    assert not kept(Turns(60.0), counted=PROMPT + 1)


def test_a_turn_is_given_away_once():
    turns = Turns(60.0)
    assert kept(turns)
    turn = turns.find(make_request(PROMPT), 0.0)
    assert turn is not None
    turns.take(turn)
    assert turns.find(make_request(PROMPT), 0.0) is None


def test_turns_expire_and_are_counted():
    turns = Turns(60.0)
    assert kept(turns)
    assert turns.find(make_request(PROMPT), 61.0) is None
    assert turns.outcomes == {"kept": 1, "expired": 1}


def test_turns_leave_with_their_worker():
    turns, worker = Turns(60.0), make_worker()
    assert kept(turns, worker=worker)
    turns.leave(make_worker())
    assert turns.find(make_request(PROMPT), 0.0) is not None
    turns.leave(worker)
    assert turns.find(make_request(PROMPT), 0.0) is None


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_parameters_are_found_wherever_the_answer_is_cut(size: int):
    body = msgspec.json.encode({"choices": [{"text": '"kv_transfer_params": {}'}], "kv_transfer_params": PARAMS})
    reader = ParamsReader()
    for at in range(0, len(body), size):
        reader.feed(body[at : at + size])
    assert reader.params() == PARAMS


NESTED = b'{"kv_transfer_params":' + b"[" * 10_000 + b"]" * 10_000


@pytest.mark.parametrize(
    "body", [b"", b'{"id":1}', b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{"a"', NESTED]
)
def test_an_answer_without_parameters_has_none(body: bytes):
    reader = ParamsReader()
    reader.feed(body)
    assert reader.params() is None
