"""Conversations that leave a busy worker: the next one's engine is told from whom to fetch their KV."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.admin.explain import explain
from gateway.fleet.ledger import Fetch
from policies.base import Tier
from tests.integration.test_relay_routing import CHUNK_TOKENS, IDS, ask, chunks_of_ids, completion, worker
from tests.peers import FakeWorker, Message, Wire, answer
from tests.relay_rig import MODEL, Rig, relay

HELD = 4 * CHUNK_TOKENS
PULL = {"group": "rack", "gb_s": 40.0, "latency_s": 0.0}
SLOW_PREFILL = {"b_s": 1e-2}


def settings(*pulls: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"pull": pull, "prefill": SLOW_PREFILL} for pull in pulls]


async def held_by_a_busy_worker(rig: Rig, name: str = "w0") -> None:
    """Let a worker hold the prompt, and have an hour of prefill before it."""
    registry, chunks = rig.services.registry, chunks_of_ids(rig)
    holder = registry.workers[name]
    await rig.services.index.store(holder.slot, chunks[:4], Tier.HOST, chunks[0])
    registry.fleet.pending_prefill_s[holder.row] = 3600.0
    registry.fleet.prefilling_since[holder.row] = monotonic()


def params(of: FakeWorker) -> Any:
    return msgspec.json.decode(of.requests[-1].body).get("kv_transfer_params")


EXPECTED_COST = {"policy": {"name": "expected-cost"}}


async def test_vllm_is_told_from_whom_to_fetch_and_the_ledger_expects_it() -> None:
    hinted = PULL | {"hint": "vllm-p2p"}
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def script(wire: Wire, _: Message) -> None:
        asked.set()
        await go_on.wait()
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with worker() as first, FakeWorker(script) as second:
        sections = settings(hinted | {"port": 7777}, hinted)
        async with relay([first, second], settings=sections, **EXPECTED_COST) as rig, rig.connect() as client:
            await held_by_a_busy_worker(rig)
            client.send(completion(IDS))
            await asked.wait()
            assert rig.services.registry.fleet.pending_prefill_tokens[1] == len(IDS) - HELD
            go_on.set()
            got = await client.read_message()
            assert got.headers["x-kvway-worker"] == "w1"
            assert got.headers["x-kvway-predicted-hit-tokens"] == str(HELD)
            source = params(second)["remote_kv_source"]
            assert (source["remote_host"], source["remote_port"]) == ("127.0.0.1", 7777)
            assert len(source["kv_request_id"]) == 32
            assert msgspec.json.decode(second.requests[-1].body)["prompt"] == IDS
            rig.services.registry.fleet.pending_prefill_s[0] = 0.0
            assert (await rig.settled()).reason == "pull"


async def test_engines_that_find_it_themselves_are_told_nothing() -> None:
    each = settings(PULL, PULL)
    async with worker() as first, worker() as second, relay([first, second], settings=each, **EXPECTED_COST) as rig:
        await held_by_a_busy_worker(rig)
        got = await ask(rig, completion(IDS, kv_transfer_params={"mine": 1}))
        assert got.headers["x-kvway-predicted-hit-tokens"] == str(HELD)
        assert params(second) == {"mine": 1}


async def test_clients_cannot_name_hosts_to_fetch_from() -> None:
    hinted = PULL | {"hint": "vllm-p2p"}
    theirs = {"remote_kv_source": {"kv_request_id": "x", "remote_host": "10.0.0.1", "remote_port": 1}}
    async with worker() as only, relay([only], settings=settings(hinted), **EXPECTED_COST) as rig:
        await ask(rig, completion(IDS, kv_transfer_params=theirs))
        assert params(only) is None


@pytest.mark.parametrize("fields", [{"n": 2}, {"echo": True}])
async def test_requests_for_several_sequences_name_no_source(fields: dict[str, Any]) -> None:
    hinted = PULL | {"hint": "vllm-p2p"}
    each = settings(hinted, hinted)
    async with worker() as first, worker() as second, relay([first, second], settings=each, **EXPECTED_COST) as rig:
        await held_by_a_busy_worker(rig)
        await ask(rig, completion(IDS, **fields))
        assert params(second) is None


async def test_without_a_common_group_nothing_is_expected_to_be_fetched() -> None:
    each = settings(PULL, {})
    async with worker() as first, worker() as second, relay([first, second], settings=each, **EXPECTED_COST) as rig:
        assert rig.services.registry.fleet.pulls is not None
        await held_by_a_busy_worker(rig)
        got = await ask(rig, completion(IDS))
        assert (got.headers["x-kvway-worker"], got.headers["x-kvway-predicted-hit-tokens"]) == ("w1", "0")


async def test_fleets_without_groups_have_no_links() -> None:
    async with worker() as only, relay([only]) as rig:
        assert rig.services.registry.fleet.pulls is None


async def test_a_stream_that_comes_sooner_than_expected_speaks_for_a_faster_link() -> None:
    usage = {"prompt_tokens": len(IDS), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": HELD}}
    events = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"choices": [], "usage": usage})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(events)
    slow = PULL | {"gb_s": 0.05}  # 0.4 s for what takes 0.6 s to compute
    each = settings(slow, slow)
    async with (
        worker() as first,
        FakeWorker(answer(head + events)) as second,
        relay([first, second], settings=each, **EXPECTED_COST) as rig,
    ):
        await held_by_a_busy_worker(rig)
        got = await ask(rig, completion(IDS, stream=True))
        assert got.headers["x-kvway-predicted-hit-tokens"] == str(HELD)
        rig.services.registry.fleet.pending_prefill_s[0] = 0.0
        assert (await rig.settled()).reason == "pull"
        assert rig.services.fetches.bytes_per_s(rig.services.registry.workers["w1"]) == pytest.approx(2 * 0.05e9)
        body = msgspec.json.encode({"model": MODEL, "prompt": IDS})
        explained = await explain(rig.services, "/v1/completions", body)
        assert [row["fetch_gb_s"] for row in explained["candidates"]] == pytest.approx([0.1, 0.1])  # w0 is like it


async def test_a_link_over_which_nobody_fetches_any_more_gets_another_chance() -> None:
    slow = PULL | {"gb_s": 0.05}
    each = settings(slow, slow)
    async with worker() as first, worker() as second, relay([first, second], settings=each, **EXPECTED_COST) as rig:
        await held_by_a_busy_worker(rig)
        fetches, target = rig.services.fetches, rig.services.registry.workers["w1"]
        for _ in range(40):
            long_ago = Fetch(target, HELD, 1.0, HELD, idle=True, took_s=1e6)
            fetches.ended(long_ago, HELD, now=monotonic() - 3600)
        slowest = fetches.bytes_per_s(target)
        got = await ask(rig, completion(IDS))
        assert got.headers["x-kvway-predicted-hit-tokens"] == "0"
        assert fetches.bytes_per_s(target) > slowest


async def test_of_a_request_whose_client_leaves_nothing_is_said() -> None:
    asked = asyncio.Event()

    async def silent(_: Wire, __: Message) -> None:
        asked.set()
        await asyncio.Event().wait()

    each = settings(PULL, PULL)
    async with (
        worker() as first,
        FakeWorker(silent) as second,
        relay([first, second], settings=each, **EXPECTED_COST) as rig,
    ):
        await held_by_a_busy_worker(rig)
        async with rig.connect() as client:
            client.send(completion(IDS))
            await asked.wait()
        rig.services.registry.fleet.pending_prefill_s[0] = 0.0
        assert (await rig.settled()).reason == "pull"
        assert b"kvway_fetches_total{" not in rig.services.observer.render()
