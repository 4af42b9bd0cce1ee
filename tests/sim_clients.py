"""How tests talk to simulated workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

import sim
from sim.server import SimWorker, WorkerSettings

TINY = Path(sim.__file__).parent / "data" / "tiny-model"
DONE = "[DONE]"


@asynccontextmanager
async def worker_and_client(**settings: Any) -> AsyncIterator[tuple[SimWorker, httpx.AsyncClient]]:
    """Run a worker, 50 times as fast as a GPU unless told otherwise, and a client for it."""
    async with (
        SimWorker(WorkerSettings(**{"model": "tiny", "speed": 50.0} | settings)) as worker,
        httpx.AsyncClient(base_url=worker.url, timeout=20) as client,
    ):
        yield worker, client


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the decoded events of a stream; the last one is the string ``[DONE]`` if it came."""
    events: list[Any] = []
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                events.append(data if data == DONE else msgspec.json.decode(data))
    return events


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come to hold in time"
        await asyncio.sleep(0.005)


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """Return ``/metrics`` as ``(name, value of its last label beside model and engine, or "")`` → value."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            values[sample.name, labels[-1] if labels else ""] = sample.value
    return values
