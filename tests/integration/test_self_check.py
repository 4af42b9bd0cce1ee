"""A gateway notices that its predictions do not come true, and an index that has missed something fills itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from gateway.app import Gateway
from gateway.config import Config
from gateway.observe.drift import MIN_REQUESTS
from policies.base import Tier
from sim.server import SimWorker, WorkerSettings
from tests.events_rig import until

CHUNK = 64
IDS = list(range(100, 100 + 10 * CHUNK))


@asynccontextmanager
async def worker_and_gateway(worker: SimWorker, **index: Any) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    assert worker.publisher is not None
    events = {"endpoint": worker.publisher.endpoint, "replay_endpoint": worker.publisher.replay_endpoint}
    config = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 1},
        "workers": [{"url": worker.url, "name": "w", "kv_events": events}],
        "prompt": {"chunk_tokens": CHUNK},
        "index": {"speculative_ttl_s": 0} | index,
        "log": {"requests": False, "level": "error"},
    }
    async with (
        Gateway(Config.model_validate(config)) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client,
    ):
        found = gateway.registry.workers["w"]
        await until(lambda: found.state == "ready" and bool(found.models) and found.slot >= 0)
        yield gateway, client


async def predicted(client: httpx.AsyncClient, ids: list[int]) -> tuple[int, int]:
    """Send a prompt; return how much of it was believed to be cached, and how much was."""
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": ids, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(answer.headers["x-kvway-predicted-hit-tokens"]), details["cached_tokens"]


async def held(gateway: Gateway, ids: list[int]) -> int:
    """Return how much of a prompt the index believes the worker to hold."""
    chunks = gateway.hasher.chain(gateway.hasher.root("m", None, None), _packed(ids))
    slots = [gateway.registry.workers["w"].slot]
    return (await gateway.index.residency(chunks, slots, CHUNK)).hit(0)


async def listened_to(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """Send prompts until their events arrive: without replay, those before the subscription are lost."""
    start = 20_000
    while not gateway.feeds.stats["w"].batches:
        start += 100
        await predicted(client, list(range(start, start + 20)))


def settings(**more: Any) -> WorkerSettings:
    return WorkerSettings(model="m", speed=100, kv_events="tcp://127.0.0.1:0", **more)


async def test_an_index_that_came_too_late_learns_from_requests_what_a_worker_holds() -> None:
    async with SimWorker(settings()) as worker:
        async with httpx.AsyncClient(base_url=worker.url) as direct:
            await direct.post("/v1/completions", json={"prompt": IDS, "max_tokens": 1})
        async with worker_and_gateway(worker, refill_share=1) as (gateway, client):
            await listened_to(gateway, client)
            assert (await predicted(client, IDS))[0] == 0
            await until(lambda: held(gateway, IDS))
            assert await predicted(client, IDS) == (len(IDS), len(IDS) - 16)  # the last token is always computed


async def test_without_reports_it_does_not() -> None:
    async with SimWorker(settings()) as worker:
        async with httpx.AsyncClient(base_url=worker.url) as direct:
            await direct.post("/v1/completions", json={"prompt": IDS, "max_tokens": 1})
        async with worker_and_gateway(worker, refill_share=0) as (gateway, client):
            await listened_to(gateway, client)
            await predicted(client, IDS)
            assert await predicted(client, IDS) == (0, len(IDS) - 16)


async def test_what_was_reported_twice_and_is_evicted_once_is_gone() -> None:
    async with (
        SimWorker(settings(capacity_tokens=2 * len(IDS))) as worker,
        worker_and_gateway(worker, refill_share=1) as (gateway, client),
    ):
        await listened_to(gateway, client)
        for _ in range(3):
            await predicted(client, IDS)
        await until(lambda: held(gateway, IDS))
        for start in (5_000, 10_000, 15_000):
            await predicted(client, list(range(start, start + len(IDS))))
        await until(lambda: held(gateway, list(range(15_000, 15_000 + len(IDS)))))
        assert await predicted(client, IDS) == (0, 0)


async def test_predictions_that_fail_have_the_worker_read_anew() -> None:
    async with (
        SimWorker(settings(kv_replay="tcp://127.0.0.1:0")) as worker,
        worker_and_gateway(worker) as (gateway, client),
    ):
        await predicted(client, IDS)
        gateway.drift.look()
        found = gateway.registry.workers["w"]
        slot = found.slot
        # A lie: prompts that nobody has computed are said to be held.
        prompts = [[number, *IDS] for number in range(MIN_REQUESTS)]
        root = gateway.hasher.root("m", None, None)
        for ids in prompts:
            await gateway.index.store(slot, gateway.hasher.chain(root, _packed(ids)), Tier.HBM)
        for ids in prompts:
            assert await predicted(client, ids) == (len(IDS), 0)
        gateway.drift.look()
        assert gateway.drift.drifts["w"] > 0.5
        await until(lambda: found.slot >= 0 and gateway.feeds.stats["w"].resyncs == 1)
        await until(lambda: gateway.feeds.stats["w"].replayed >= MIN_REQUESTS)
        assert await predicted(client, [MIN_REQUESTS, *IDS]) == (0, 0)
        hit, cached = await predicted(client, prompts[0])
        assert 0 <= cached - hit < CHUNK
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}") as admin:
            metrics = (await admin.get("/metrics")).text
    assert 'kvway_kv_resyncs_total{worker="w"} 1' in metrics
    assert 'kvway_drift_ratio{worker="w"} 0.' in metrics


def _packed(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)
