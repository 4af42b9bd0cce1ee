"""The whole gateway before simulated workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from gateway.app import Gateway
from gateway.config import Config
from sim.server import SimWorker, WorkerSettings
from tests.processes import ROOT, free_ports

MODEL = "tiny"
FILES = ROOT / "sim" / "data" / "tiny-model"
STORY = "The lighthouse keeper wrote down every ship that passed. " * 40


@contextlib.asynccontextmanager
async def fleet(
    workers: int = 2, adapters: tuple[str, ...] = (), capacity_tokens: int = 461_376, **sections: Any
) -> AsyncIterator[Gateway]:
    """A gateway before ``workers`` simulated ones, ready to serve."""
    async with contextlib.AsyncExitStack() as stack:
        entries = []
        for number in range(workers):
            events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
            settings = WorkerSettings(
                model=MODEL,
                adapters=adapters,
                tokenizer=FILES,
                speed=50,
                capacity_tokens=capacity_tokens,
                kv_events=events,
                kv_replay=replay,
            )
            worker = await stack.enter_async_context(SimWorker(settings))
            published = {"endpoint": events, "replay_endpoint": replay}
            entries.append({"name": f"worker-{number}", "url": worker.url, "kv_events": published})
        config = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 2},
            "workers": entries,
            "models": {MODEL: {"tokenizer": str(FILES)}},
            "prompt": {"chunk_tokens": 32},
            "log": {"requests": False, "level": "error"},
        }
        gateway = await stack.enter_async_context(Gateway(Config.model_validate(config | sections)))
        await until(lambda: len(ready(gateway)) == workers)
        yield gateway


def ready(gateway: Gateway) -> list[str]:
    return [each.name for each in gateway.registry.workers.values() if each.state == "ready" and each.models]


async def until(condition: Any, seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def admin_of(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the admin port."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}", timeout=20) as client:
        yield client
