"""The whole gateway before simulated workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from gateway.app import Gateway
from gateway.config import Config
from sim.server import SimWorker, WorkerSettings
from tests.processes import ROOT

MODEL = "tiny"
FILES = ROOT / "sim" / "data" / "tiny-model"
STORY = "The lighthouse keeper wrote down every ship that passed. " * 40


@contextlib.asynccontextmanager
async def sim_workers(n: int, events: bool = True, **settings: Any) -> AsyncIterator[list[SimWorker]]:
    """Run simulated workers, 50 times as fast as a GPU unless told otherwise."""
    given: dict[str, Any] = {"model": MODEL, "tokenizer": FILES, "speed": 50.0}
    if events:
        given |= {"kv_events": "tcp://127.0.0.1:0", "kv_replay": "tcp://127.0.0.1:0"}
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SimWorker(WorkerSettings(**given | settings))) for _ in range(n)]


def entries(workers: Sequence[SimWorker], name: str) -> list[dict[str, Any]]:
    """Return a configuration's ``workers``; ``name`` and a number is what each is called."""
    found: list[dict[str, Any]] = [{"url": each.url, "name": f"{name}{number}"} for number, each in enumerate(workers)]
    for entry, worker in zip(found, workers, strict=True):
        if (publisher := worker.publisher) is not None:
            entry["kv_events"] = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return found


@contextlib.asynccontextmanager
async def fleet(
    workers: int = 2, adapters: tuple[str, ...] = (), capacity_tokens: int = 461_376, **sections: Any
) -> AsyncIterator[Gateway]:
    """A gateway before ``workers`` simulated ones, ready to serve."""
    async with sim_workers(workers, adapters=adapters, capacity_tokens=capacity_tokens) as started:
        config = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 2},
            "workers": entries(started, "worker-"),
            "models": {MODEL: {"tokenizer": str(FILES)}},
            "prompt": {"chunk_tokens": 32},
            "log": {"requests": False, "level": "error"},
        }
        async with Gateway(Config.model_validate(config | sections)) as gateway:
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
