"""Several gateways on one Valkey, in front of simulated workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import httpx
import msgspec

from gateway.admin.explain import explain
from gateway.app import Gateway
from gateway.config import Config
from gateway.fleet.registry import NO_SLOT, State
from sim.server import SimWorker
from tests.events_rig import until
from tests.gateway_rig import FILES, MODEL, entries
from tests.valkey import Valkey

_namespaces = count()


def config_for(workers: Sequence[SimWorker], url: str, **sections: Any) -> dict[str, Any]:
    """Return the configuration of a replica, as data."""
    config = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 5},
        "workers": entries(workers, "w"),
        "models": {"*": {"tokenizer": str(FILES)}},
        "prompt": {"chunk_tokens": 16},
        "index": {"backend": "redis", "url": url, "namespace": f"sharing-{next(_namespaces)}", "timeout_s": 0.5},
        "policy": {"name": "expected-cost"},
        "health": {"interval_s": 0.5, "timeout_s": 5},
        "log": {"requests": False},
    }
    return config | sections


@contextlib.asynccontextmanager
async def replicas(
    workers: Sequence[SimWorker], valkey: Valkey, n: int = 2, **sections: Any
) -> AsyncIterator[list[Gateway]]:
    """Run gateways that share ``workers``, connected with each other and ready."""
    config = Config.model_validate(config_for(workers, valkey.url, **sections))
    async with contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(Gateway(config)) for _ in range(n)]
        await until(lambda: all(is_settled(gateway, n) for gateway in gateways), within_s=30)
        yield gateways


def is_settled(gateway: Gateway, n: int) -> bool:
    """Whether a gateway knows of ``n`` replicas at least, itself included, and of a slot for every worker."""
    fleet = gateway.registry.workers.values()
    return metric(gateway, "kvway_replicas") >= n and all(
        worker.state is State.READY and worker.slot != NO_SLOT for worker in fleet
    )


def owners(gateways: Sequence[Gateway]) -> dict[str, list[int]]:
    """Return which gateways follow which worker."""
    return {
        name: [number for number, gateway in enumerate(gateways) if name in gateway.feeds.stats]
        for name in gateways[0].registry.workers
    }


def metric(gateway: Gateway, name: str) -> float:
    """Return a metric without labels."""
    for line in gateway.observer.render().decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"there is no metric {name}")


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4} | fields


async def ask(client: httpx.AsyncClient, gateway: Gateway, prompt: str, **fields: Any) -> httpx.Response:
    """Send a completion through a gateway."""
    url = f"http://127.0.0.1:{gateway.port}/v1/completions"
    return await client.post(url, json=completion(prompt, **fields))


async def predicted(gateway: Gateway, prompt: str) -> dict[str, int]:
    """Return worker → prompt tokens it is believed to hold."""
    body = msgspec.json.encode(completion(prompt))
    answer = await explain(gateway.services, "/v1/completions", body)
    return {entry["worker"]: entry["hit_tokens"] for entry in answer["candidates"]}


async def all_predict(gateways: Sequence[Gateway], prompt: str, worker: str, tokens: int) -> None:
    """Wait until every gateway believes that ``worker`` holds ``tokens`` of ``prompt``."""

    async def seen() -> bool:
        found = [await predicted(gateway, prompt) for gateway in gateways]
        return all(hits[worker] == tokens for hits in found)

    await until(seen)
