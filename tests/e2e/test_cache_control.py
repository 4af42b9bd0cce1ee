"""``kvway cache`` with a real LMCache beside the fleet: its coordinator, and a cache server that no engine has joined.

A server holds KV only for engines on its own machine's GPUs. So one worker has the real server, which holds nothing,
and another one a server that answers as if it had all; what either is said to hold, the coordinator is told in the
events that servers send it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.gateway_rig import MODEL, fleet
from tests.integration.test_cache_control import admin_of, ask, refusal
from tests.lmcache import asked, peer
from tests.processes import ROOT, free_ports, running, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
CHUNK_TOKENS = 64  # LMCache's; the gateway's are half as long
TOKENS = list(range(100, 300))
CHUNKS = len(TOKENS) // CHUNK_TOKENS
PROMPT = {"model": MODEL, "prompt": TOKENS, "cache_salt": "tenant-a"}
REAL, ACTED = "worker-0", "worker-1"


@dataclass(frozen=True)
class LMCache:
    """URLs of a running coordinator and of the HTTP API of its server."""

    coordinator: str
    server: str


@pytest.fixture(scope="module")
def lmcache() -> Iterator[LMCache]:
    if not PYTHON.exists():
        pytest.skip("no .venv-lmcache: `make e2e-lmcache` makes it")
    port, server, http = free_ports(3)
    url = f"http://127.0.0.1:{port}"
    coordinator = [PYTHON, "-m", "lmcache.v1.mp_coordinator", "--host", "127.0.0.1", "--port", str(port)]
    coordinator += ["--chunk-size", str(CHUNK_TOKENS), "--instance-timeout", "600"]
    serve = [PYTHON.parent / "lmcache", "server", "--instance-id", REAL, "--chunk-size", str(CHUNK_TOKENS)]
    serve += ["--host", "127.0.0.1", "--port", str(server), "--http-host", "127.0.0.1", "--http-port", str(http)]
    serve += ["--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--disable-metrics"]
    serve += ["--coordinator-url", url, "--coordinator-advertise-ip", "127.0.0.1"]
    with running(coordinator) as process:
        wait_for(f"{url}/healthz", process, 300)
        with running(serve, LMCACHE_DISABLE_BANNER="1") as cache_server:
            wait_for(f"{url}/instances/{REAL}/usage", cache_server, 300)
            yield LMCache(url, f"http://127.0.0.1:{http}")


@contextlib.asynccontextmanager
async def fleet_beside(lmcache: LMCache, answers: dict[str, Any]) -> AsyncIterator[Any]:
    """A fleet, its admin port, and the server that acts with ``answers``."""
    async with (
        peer(answers) as acted,
        httpx.AsyncClient(base_url=lmcache.coordinator) as coordinator,
        fleet(cache_control={"coordinator": lmcache.coordinator}) as gateway,
        admin_of(gateway) as admin,
    ):
        registration = {"instance_id": ACTED, "ip": "127.0.0.1", "http_port": acted.port}
        (await coordinator.post("/instances", json=registration)).raise_for_status()
        yield admin, coordinator, acted


async def keys_of(coordinator: httpx.AsyncClient, admin: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The real coordinator's names of the prompt's chunks, under the model that the engines say they have loaded."""
    cards = (await admin.get("/admin/workers")).json()
    assert cards[0]["models"] == {MODEL: MODEL}
    root = str(ROOT / "sim" / "data" / "tiny-model")
    question = {"model_name": root, "world_size": 1, "token_ids": TOKENS, "cache_salt": "tenant-a"}
    answer = await coordinator.post("/directory/lookup", json=question)
    return [result["key"] for result in answer.json()["results"]]


async def tell(coordinator: httpx.AsyncClient, keys: list[dict[str, Any]], incarnation: int, **where: Any) -> None:
    entries = [
        {
            "key": key,
            "size_bytes": 1 << 20,
            "token_ids": TOKENS[CHUNK_TOKENS * number : CHUNK_TOKENS * (number + 1)],
            "token_offset": CHUNK_TOKENS * number,
        }
        for number, key in enumerate(keys)
    ]
    batch = {"instance_id": ACTED, "incarnation": incarnation, "seq": 1, "event_type": "store", "entries": entries}
    answer = await coordinator.post("/events", json={"batches": [batch | where]})
    assert answer.json()["applied"] == 1, answer.text


async def test_lookup_says_what_the_real_directory_holds_of_the_gateways_tokens(lmcache: LMCache) -> None:
    async with fleet_beside(lmcache, {}) as (admin, coordinator, _):
        keys = await keys_of(coordinator, admin)
        assert len(keys) == CHUNKS
        await tell(coordinator, keys[:2], 1, tier="l1", backend="dram", shared=False)
        found = (await ask(admin, "lookup", PROMPT))["coordinator"]
        assert found["chunks"] == CHUNKS
        rows = {row["instance"]: row for row in found["instances"]}
        assert rows[ACTED]["host_tokens"] == rows[ACTED]["hit_tokens"] == 2 * CHUNK_TOKENS
        assert rows[REAL]["hit_tokens"] == 0
        await tell(coordinator, keys, 2, tier="l2", backend="valkey", shared=True)
        rows = {row["instance"]: row for row in (await ask(admin, "lookup", PROMPT))["coordinator"]["instances"]}
        assert rows[REAL]["remote_tokens"] == CHUNKS * CHUNK_TOKENS  # a shared store is everybody's
        other = (await ask(admin, "lookup", PROMPT | {"cache_salt": "tenant-b"}))["coordinator"]["instances"]
        assert [row["hit_tokens"] for row in other] == [0, 0]


async def test_pins_and_quotas_are_in_the_real_coordinators_books(lmcache: LMCache) -> None:
    async with fleet_beside(lmcache, {}) as (admin, coordinator, _):
        assert (await ask(admin, "pin", PROMPT))["keys"] == CHUNKS
        pins = (await coordinator.get("/cache/pins", params={"cache_salt": "tenant-a"})).json()
        assert [pin["pin_count"] for pin in pins["pins"]] == [1] * CHUNKS
        assert (await ask(admin, "unpin", PROMPT))["status"] == "unpinned"
        assert (await coordinator.get("/cache/pins")).json()["total"] == 0
        (await admin.put("/admin/cache/quota", params={"salt": "tenant-a", "limit_gb": 2})).raise_for_status()
        quotas = (await admin.get("/admin/cache/stats")).json()["coordinator"]["quotas"]["by_cache_salt"]
        assert {"cache_salt": "tenant-a", "quota_limit_gb": 2.0}.items() <= quotas[-1].items()
        assert (await admin.delete("/admin/cache/quota", params={"salt": "tenant-a"})).json()["status"] == "removed"
        status, message = await refusal(admin, "pin", {"model": MODEL, "prompt": [1] * 1_100_000})
        assert (status, "too many token_ids" in message) == (400, True)


async def test_a_real_server_without_an_engine_loads_nothing_so_the_worker_computes(lmcache: LMCache) -> None:
    async with fleet_beside(lmcache, {}) as (admin, _, _):
        status, message = await refusal(admin, "prefetch", PROMPT, worker=REAL, by="coordinator")
        assert status == 502
        assert "prefetch submit" in message
        done = await ask(admin, "prefetch", PROMPT, worker=REAL)
        assert done["by"] == "warm-up"
        assert "prefetch submit" in done["coordinator_problem"]


async def test_a_move_loads_through_the_coordinator_and_deletes_on_the_real_server(lmcache: LMCache) -> None:
    loaded = {"request_id": "r1", "chunks": CHUNKS, "status": "submitted"}
    progress = {"request_id": "r1", "status": "completed", "total_keys": CHUNKS, "found_keys": CHUNKS}
    answers = {"POST /cache/prefetches": loaded, "GET /cache/prefetches/r1": progress}
    async with fleet_beside(lmcache, answers) as (admin, _, acted):
        done = await ask(admin, "move", PROMPT, source=REAL, target=ACTED)
        assert (done["status"], done["found_keys"], done["deleted_keys"]) == ("moved", CHUNKS, 0)  # it held none
        assert asked(acted, "POST", "/cache/prefetches")[0]["token_ids"] == TOKENS


async def test_clear_reaches_the_real_server_and_the_engines(lmcache: LMCache) -> None:
    async with fleet_beside(lmcache, {"POST /cache/clear": {"status": "ok"}}) as (admin, coordinator, acted):
        rows = (await ask(admin, "clear", None))["workers"]
        assert [(row["engine"], row["lmcache"]) for row in rows] == [("cleared", "cleared")] * 2
        assert asked(acted, "POST", "/cache/clear") == [{"tier": "l1"}]
        unheard = PROMPT | {"cache_salt": "tenant-c"}
        rows = (await ask(admin, "clear", unheard, worker=REAL))["workers"]
        assert rows == [{"worker": REAL, "deleted_keys": 0, "kept_keys": 0}]
        await tell(coordinator, await keys_of(coordinator, admin), 3, tier="l2", backend="valkey", shared=True)
        [row] = (await ask(admin, "clear", PROMPT, worker=REAL))["workers"]
        assert "delete to 'worker-0' failed" in row["problem"]  # it does not mount the store in which the prompt lies
        await coordinator.delete(f"/instances/{ACTED}")
        assert (await ask(admin, "clear", None, worker=ACTED))["workers"][0]["lmcache"] is None
