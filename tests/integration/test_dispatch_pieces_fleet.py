"""Long prompts in pieces: the whole gateway before simulated workers, which tokenize, cache and tell what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.config import Config
from sim.faults import Fault
from sim.server import SimWorker
from tests.gateway_rig import FILES, MODEL, STORY, entries, ready, sim_workers, until
from tests.sharing_rig import replicas
from tests.valkey import Valkey

CONFIG: dict[str, Any] = {
    "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 2},
    "models": {MODEL: {"tokenizer": str(FILES)}},
    "prompt": {"chunk_tokens": 32},
    "log": {"requests": False, "level": "error"},
    "replication": {"enabled": False},
    "health": {"interval_s": 0.2},
}
PIECES = {"piece_tokens": 256, "budget_tokens": 256}
CHAT = [{"role": "user", "content": STORY * 4}]


@asynccontextmanager
async def fleet(
    n: int = 1, speed: float = 50.0, dispatch: dict[str, Any] = PIECES, **settings: Any
) -> AsyncIterator[tuple[Gateway, list[SimWorker]]]:
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(sim_workers(n, speed=speed, **settings))
        config = CONFIG | {"workers": entries(workers, "w"), "dispatch": dispatch}
        gateway = await stack.enter_async_context(Gateway(Config.model_validate(config)))
        rows = gateway.registry.fleet
        await until(lambda: len(ready(gateway)) == n and rows.kv_capacity_tokens.all())
        yield gateway, workers


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


async def ask(client: httpx.AsyncClient, gateway: Gateway, messages: list[dict[str, str]] = CHAT) -> str:
    """Send a chat and return its stream, as far as it is the same every time."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": True, "seed": 1, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    answer = await client.post(f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event.partition('"delta"')[2] for event in events)


def counted(gateway: Gateway, name: str) -> float:
    """Return a metric, summed over its labels."""
    lines = gateway.observer.render().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def pieces(gateway: Gateway) -> float:
    return counted(gateway, "kvway_dispatch_pieces_total")


async def nothing_left(gateway: Gateway) -> None:
    await until(lambda: not gateway.ledger.in_flight)
    for column in ("pending_prefill_tokens", "pending_prefill_s", "running", "decode_tokens"):
        assert not gateway.registry.fleet.column(column).any(), column


async def test_the_answer_is_the_same_as_that_to_a_whole_prompt(client: httpx.AsyncClient) -> None:
    answers = []
    for dispatch in (PIECES, PIECES | {"piece_tokens": 0}):
        async with fleet(dispatch=dispatch) as (gateway, _):
            answers.append(await ask(client, gateway))
            assert (pieces(gateway) > 5) == (dispatch is PIECES)
            await nothing_left(gateway)
    assert answers[0] == answers[1] != ""


async def test_a_short_prompt_is_answered_while_a_long_one_is_computed(client: httpx.AsyncClient) -> None:
    async with fleet(speed=2.0) as (gateway, _):
        long = asyncio.ensure_future(ask(client, gateway))
        await until(lambda: pieces(gateway) > 0)
        await ask(client, gateway, [{"role": "user", "content": "Quick!"}])
        before = pieces(gateway)
        await long
        assert pieces(gateway) > before
        await nothing_left(gateway)


async def test_predictions_and_reports_agree_and_the_next_turn_is_a_hit(client: httpx.AsyncClient) -> None:
    async with fleet() as (gateway, _):
        await ask(client, gateway)
        tokens = counted(gateway, "kvway_prompt_tokens_total")
        assert counted(gateway, "kvway_dispatch_piece_tokens_total") > 0.5 * tokens
        assert counted(gateway, "kvway_cached_tokens_total") == 0
        await ask(client, gateway, [*CHAT, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "?"}])
        assert counted(gateway, "kvway_cached_tokens_total") > 0.9 * tokens
        assert counted(gateway, "kvway_checked_requests_total") == 2
        off = counted(gateway, "kvway_overpredicted_tokens_total") + counted(
            gateway, "kvway_underpredicted_tokens_total"
        )
        assert off <= 2 * 32
        await nothing_left(gateway)


async def test_a_worker_killed_between_pieces_leaves_the_prompt_to_another(client: httpx.AsyncClient) -> None:
    async with fleet(2, speed=2.0) as (gateway, workers):
        answer = asyncio.ensure_future(ask(client, gateway))
        await until(lambda: pieces(gateway) > 0)
        [row] = gateway.registry.fleet.running.nonzero()[0].tolist()
        workers[row].begin_fault(Fault("die"))
        assert await answer != ""
        await nothing_left(gateway)


async def test_a_client_that_leaves_between_pieces_leaves_nothing_behind(client: httpx.AsyncClient) -> None:
    async with fleet(speed=2.0) as (gateway, _):
        answer = asyncio.ensure_future(ask(client, gateway))
        await until(lambda: pieces(gateway) > 0)
        answer.cancel()
        await nothing_left(gateway)
        sent = pieces(gateway)
        await ask(client, gateway, [{"role": "user", "content": "Quick!"}])
        assert pieces(gateway) == sent


async def test_other_replicas_hear_of_the_whole_prompt_and_its_end(valkey: Valkey, client: httpx.AsyncClient) -> None:
    sections = {"dispatch": PIECES, "policy": {"name": "least-work"}}
    async with sim_workers(1, speed=0.02) as workers, replicas(workers, valkey, **sections) as (one, other):
        await until(lambda: one.registry.fleet.kv_capacity_tokens.all())
        answer = asyncio.ensure_future(ask(client, one))
        await until(lambda: one.ledger.in_flight == 2)  # the request, and a piece that takes as long as the test
        pending = float(one.registry.fleet.pending_prefill_tokens[0])
        assert pending > 10 * 256
        await until(lambda: other.registry.candidates(MODEL).fleet.pending_prefill_tokens[0] == pending)
        answer.cancel()
        await nothing_left(one)
        await until(lambda: not other.registry.candidates(MODEL).fleet.pending_prefill_tokens.any())
