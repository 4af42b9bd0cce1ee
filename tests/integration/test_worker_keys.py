"""Workers that demand an API key: requests of our own bring theirs, those of clients what their clients sent."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.config import Config
from tests.gateway_rig import ready, sim_workers, until
from tests.integration.test_cache_control import admin_of
from tests.integration.test_cache_control import ask as steer
from tests.integration.test_check import config_of, findings_of, problems, simulated
from tests.integration.test_replication import ONE_WORKER, REPLICATION, STORY, USES, look, warm_ups
from tests.sharing_rig import ask, completion, config_for, predicted

KEY = "key-of-the-engines"
CLIENTS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "api-key"
    path.write_text(KEY + "\n")
    return path


@contextlib.asynccontextmanager
async def locked_fleet(entry: dict[str, Any]) -> AsyncIterator[Gateway]:
    """A gateway before two workers that demand a key."""
    sections = {"index": {"backend": "memory"}, "policy": ONE_WORKER, "replication": REPLICATION}
    async with contextlib.AsyncExitStack() as stack:
        workers = await stack.enter_async_context(sim_workers(2, api_key=KEY))
        config = config_for(workers, "", models={"*": {"source": "engine"}}, **sections)
        config["workers"] = [worker | entry for worker in config["workers"]]
        gateway = await stack.enter_async_context(Gateway(Config.model_validate(config)))
        await until(lambda: all(worker.state == "ready" for worker in gateway.registry.workers.values()))
        yield gateway


async def test_what_kvway_itself_asks_of_workers_brings_their_key(key_file: Path) -> None:
    async with (
        locked_fleet({"api_key_file": str(key_file)}) as gateway,
        admin_of(gateway) as admin,
        httpx.AsyncClient(timeout=30, headers=CLIENTS) as client,
    ):
        await until(lambda: len(ready(gateway)) == 2)  # their models are known
        for number in range(USES):
            assert (await ask(client, gateway, f"{STORY}Question {number}?")).status_code == 200
        hits = await predicted(gateway, STORY)
        assert sorted(hit > 100 for hit in hits.values()) == [False, True]  # by tokens that only the engines know
        await look(gateway)
        assert warm_ups(gateway) == {"completed": 1}
        prefetched = await steer(admin, "prefetch", completion(f"Another one. {STORY}"), worker="w0")
        assert (prefetched["by"], prefetched["tokens"] > 100) == ("warm-up", True)
        cleared = await steer(admin, "clear", None, worker="w0")
        assert cleared["workers"][0]["engine"] == "cleared"


async def test_a_client_without_a_key_is_not_lent_that_of_the_gateway(key_file: Path) -> None:
    async with locked_fleet({"api_key_file": str(key_file)}) as gateway, httpx.AsyncClient() as client:
        await until(lambda: len(ready(gateway)) == 2)
        assert (await ask(client, gateway, STORY)).status_code == 401


async def test_without_the_key_warm_ups_are_refused(key_file: Path) -> None:
    async with locked_fleet({"models": ["tiny"]}) as gateway, httpx.AsyncClient(headers=CLIENTS) as client:
        for number in range(USES):
            assert (await ask(client, gateway, f"{STORY}Question {number}?")).status_code == 200
        await look(gateway)
        assert warm_ups(gateway) == {"failed": 1}


async def test_the_check_says_that_a_key_is_wanted_and_is_content_with_one(key_file: Path) -> None:
    async with simulated(api_key=KEY) as worker:
        found = problems(await findings_of(config_of(worker)))
        assert list(found) == ["api_key"]
        assert "api_key_file" in found["api_key"].mend
        mended = config_of(worker, entry={"api_key_file": str(key_file)})
        assert not problems(await findings_of(mended)).keys() & {"api_key", "models", "overlap", "usage", "events"}
        key_file.write_text("exchanged")
        assert str(key_file) in problems(await findings_of(mended))["api_key"].message
