"""``kvway cache`` before simulated workers, and before peers that answer as LMCache does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from gateway.app import Gateway
from gateway.cli import app
from gateway.config import Config
from sim.server import SimWorker, WorkerSettings
from tests.gateway_rig import FILES, MODEL, STORY, admin_of, fleet, until
from tests.lmcache import asked, peer, recorded
from tests.peers import FakeWorker, Message, Wire, answer, response
from tests.processes import free_ports

CHUNK_TOKENS = 32
PROMPT = {"model": MODEL, "prompt": STORY, "max_tokens": 2}
LOAD = "POST /cache/prefetches"
LOADED = {"instance_id": "worker-1", "request_id": "r1", "chunks": 2, "status": "submitted"}
PROGRESS = "GET /cache/prefetches/worker-1/r1"


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with fleet() as gateway:
        yield gateway


@pytest.fixture
async def admin(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_of(gateway) as client:
        yield client


async def ask(admin: httpx.AsyncClient, verb: str, body: Any = PROMPT, **parameters: Any) -> dict[str, Any]:
    content = b"" if body is None else json.dumps(body)
    answer = await admin.post(f"/admin/cache/{verb}", params=parameters, content=content)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(admin: httpx.AsyncClient, verb: str, body: Any = PROMPT, **parameters: Any) -> tuple[int, str]:
    answer = await admin.post(f"/admin/cache/{verb}", params=parameters, content=json.dumps(body))
    return answer.status_code, answer.json()["error"]["message"]


async def held(admin: httpx.AsyncClient, body: Any = PROMPT) -> dict[str, int]:
    return {row["worker"]: row["hit_tokens"] for row in (await ask(admin, "lookup", body))["workers"]}


async def holds(admin: httpx.AsyncClient, worker: str) -> int:
    """Wait until events say that a worker holds the prompt, and return how much of it."""
    async with asyncio.timeout(10):
        while not (tokens := (await held(admin))[worker]):
            await asyncio.sleep(0.01)
    return tokens


async def metric(admin: httpx.AsyncClient, name: str, **labels: str) -> float | None:
    text = (await admin.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next((each.value for each in samples if each.name == name and labels.items() <= each.labels.items()), None)


async def test_a_prefetched_prompt_is_found_on_the_named_worker(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    assert await held(admin) == {"worker-0": 0, "worker-1": 0}
    done = await ask(admin, "prefetch", worker="worker-1")
    whole = done["tokens"]
    assert (done["by"], done["cached_tokens"]) == ("warm-up", 0)
    assert whole > 500
    assert whole % CHUNK_TOKENS == 0
    assert await holds(admin, "worker-1") == whole
    assert (await held(admin))["worker-0"] == 0
    assert (await ask(admin, "prefetch", worker="worker-1"))["cached_tokens"] >= whole - CHUNK_TOKENS
    assert await metric(admin, "kvway_cache_warmups_total", worker="worker-1", outcome="completed") == 2
    assert await metric(admin, "kvway_cache_warmup_tokens_total", worker="worker-1") == whole
    assert await metric(admin, "kvway_requests_total") is None  # it is no client's request
    assert gateway.ledger.in_flight == 0


async def test_prefetches_are_bounded_and_those_that_fail_are_reported() -> None:
    async with fleet(cache_control={"warm_up_tokens_per_min": 100}) as gateway, admin_of(gateway) as admin:
        url = gateway.registry.workers["worker-1"].config.url
        await asyncio.to_thread(httpx.post, f"{url}/sim/fault", json={"kind": "error503"})
        status, message = await refusal(admin, "prefetch", {**PROMPT, "prompt": STORY[:200]}, worker="worker-1")
        assert (status, message) == (502, "worker-1 did not compute the prompt: it answered 503.")
        assert await metric(admin, "kvway_cache_warmups_total", worker="worker-1", outcome="failed") == 1
        assert gateway.ledger.in_flight == 0
        await ask(admin, "prefetch", worker="worker-0")  # overdraws
        status, message = await refusal(admin, "prefetch", worker="worker-1")
        assert status == 429
        assert "warm_up_tokens_per_min" in message
        assert await metric(admin, "kvway_cache_warmups_total", worker="worker-1", outcome="refused") == 1
        assert (await held(admin))["worker-1"] == 0


async def test_without_an_allowance_nothing_is_prefetched() -> None:
    async with fleet(cache_control={"warm_up_tokens_per_min": 0}) as gateway, admin_of(gateway) as admin:
        status, message = await refusal(admin, "prefetch", worker="worker-1")
        assert status == 501
        assert "warm_up_tokens_per_min is 0" in message


async def test_a_cleared_worker_holds_nothing_for_the_index_and_the_engine(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    for worker in ("worker-0", "worker-1"):
        await ask(admin, "prefetch", worker=worker)
        assert await holds(admin, worker)
    cleared = await ask(admin, "clear", None, worker="worker-0")
    assert cleared == {"workers": [{"worker": "worker-0", "engine": "cleared", "lmcache": None, "index": "cleared"}]}
    tokens = await held(admin)
    assert tokens["worker-0"] == 0
    assert tokens["worker-1"] > 0
    assert (await ask(admin, "prefetch", worker="worker-0"))["cached_tokens"] == 0
    assert await holds(admin, "worker-0") == tokens["worker-1"]  # what comes after the reset is known again
    await ask(admin, "clear", None)
    assert await held(admin) == {"worker-0": 0, "worker-1": 0}


async def test_what_was_announced_before_a_reset_is_not_believed_when_it_comes_after_it() -> None:
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    published = {"endpoint": events, "replay_endpoint": replay}
    settings = WorkerSettings(model=MODEL, tokenizer=FILES, speed=50, kv_events=events, kv_replay=replay)
    async with SimWorker(settings) as worker:
        assert worker.publisher is not None
        announced: list[Any] = []
        publish = worker.publisher.publish
        worker.publisher.publish = lambda batch: (announced.append(batch), publish(batch))[1]  # type: ignore[method-assign]
        config = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0},
            "workers": [{"name": "worker-0", "url": worker.url, "kv_events": published}],
            "models": {MODEL: {"tokenizer": str(FILES)}},
            "prompt": {"chunk_tokens": CHUNK_TOKENS},
            "index": {"speculative_ttl_s": 0},
            "log": {"requests": False, "level": "error"},
        }
        async with Gateway(Config.model_validate(config)) as gateway, admin_of(gateway) as admin:
            await until(gateway.registry.any_ready)
            await ask(admin, "prefetch", worker="worker-0")
            assert await holds(admin, "worker-0")
            await ask(admin, "clear", None)
            before = list(announced)
            for batch in before:
                publish(batch)
            await until(lambda: gateway.feeds.stats["worker-0"].batches == 2 * len(before))
            assert await held(admin) == {"worker-0": 0}
            other = {**PROMPT, "prompt": f"Another. {STORY}"}
            tokens = (await ask(admin, "prefetch", other, worker="worker-0"))["tokens"]
            await until(lambda: gateway.feeds.stats["worker-0"].batches > 2 * len(before))
            assert (await held(admin, other))["worker-0"] == tokens


async def test_an_engine_whose_blocks_are_in_use_is_not_cleared_and_the_index_keeps_what_it_holds() -> None:
    async with fleet(workers=1) as gateway, admin_of(gateway) as admin:
        await ask(admin, "prefetch", worker="worker-0")
        tokens = await holds(admin, "worker-0")
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", url, json={**PROMPT, "stream": True, "max_tokens": 20_000}) as stream,
        ):
            await anext(stream.aiter_raw())
            [row] = (await ask(admin, "clear", None, worker="worker-0"))["workers"]
        assert "keeps" in row["engine"]
        assert row["index"] is None
        assert (await held(admin))["worker-0"] == tokens


async def test_without_events_the_model_of_a_cleared_worker_is_dropped() -> None:
    async with SimWorker(WorkerSettings(model=MODEL, speed=50)) as worker:
        config = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0},
            "workers": [{"name": "worker-0", "url": worker.url, "models": [MODEL]}],
            "prompt": {"chunk_tokens": CHUNK_TOKENS},
            "index": {"speculative_ttl_s": 0},
            "log": {"requests": False, "level": "error"},
        }
        async with Gateway(Config.model_validate(config)) as gateway, admin_of(gateway) as admin:
            await until(gateway.registry.any_ready)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client:
                await client.post("/v1/completions", json=PROMPT)
            tokens = await holds(admin, "worker-0")
            [row] = (await admin.get("/admin/cache/stats")).json()["workers"]
            assert row["source"] == "model"
            assert row["tiers"]["hbm"]["tokens"] >= tokens
            await ask(admin, "clear", None)
            assert await held(admin) == {"worker-0": 0}
            assert (await ask(admin, "lookup"))["exact"] is False


async def test_what_engines_alone_cannot_do_and_what_is_mistaken_is_told(admin: httpx.AsyncClient) -> None:
    impossible: list[tuple[str, dict[str, str]]] = [
        ("pin", {}),
        ("unpin", {}),
        ("move", {"source": "worker-0", "target": "worker-1"}),
        ("clear", {}),
    ]
    for verb, parameters in impossible:
        status, message = await refusal(admin, verb, **parameters)
        assert status == 501, verb
        assert message.startswith("Engines ")
        assert "cache_control.coordinator" in message
    mistakes: list[tuple[str, Any, dict[str, str], int]] = [
        ("lookup", {"model": "other", "prompt": "x"}, {}, 404),
        ("lookup", {"model": MODEL, "prompt": 7}, {}, 400),
        ("lookup", PROMPT, {"path": "/v1/embeddings"}, 400),
        ("prefetch", PROMPT, {"worker": "nobody"}, 404),
        ("prefetch", {"model": MODEL, "prompt": "short"}, {"worker": "worker-0"}, 501),
        ("prefetch", PROMPT, {"worker": "worker-0", "by": "coordinator"}, 501),
        ("prefetch", PROMPT, {"worker": "worker-0", "by": "magic"}, 400),
        ("prefetch", PROMPT, {}, 400),
    ]
    for verb, body, parameters, status in mistakes:
        assert (await refusal(admin, verb, body, **parameters))[0] == status, (verb, body)


async def test_stats_say_what_is_held_and_how_old_it_becomes() -> None:
    async with fleet(workers=1, capacity_tokens=2048) as gateway, admin_of(gateway) as admin:
        for number in range(40):
            await ask(admin, "prefetch", {"model": MODEL, "prompt": f"{number}: {STORY}"}, worker="worker-0")

        async def hbm() -> dict[str, Any]:
            [row] = (await admin.get("/admin/cache/stats")).json()["workers"]
            return row["tiers"]["hbm"]

        async with asyncio.timeout(10):
            while (await hbm())["eviction_age_s"] is None:
                await asyncio.sleep(0.01)
        now = await hbm()
        assert now["tokens"] == CHUNK_TOKENS * now["chunks"]
        assert 1024 <= now["tokens"] <= now["capacity_tokens"]
        assert 0 < now["eviction_age_s"] < 60


# LMCache


@contextlib.asynccontextmanager
async def with_lmcache(answers: dict[str, Any], servers: tuple[str, ...] = ("worker-0", "worker-1")) -> AsyncIterator:
    """A fleet whose workers have LMCache servers; ``answers`` are the coordinator's, the servers can be cleared."""
    async with peer(answers) as coordinator, peer({"POST /cache/clear": {"status": "ok"}}) as server:
        answers["GET /instances"] = {
            "instances": [{"instance_id": name, "ip": "127.0.0.1", "http_port": server.port} for name in servers]
        }
        settings = {"coordinator": coordinator.url, "world_size": 2}
        async with fleet(cache_control=settings) as gateway, admin_of(gateway) as admin:
            yield admin, coordinator, server


async def test_lookup_brings_the_coordinators_answer_for_the_very_tokens() -> None:
    async with with_lmcache({"POST /directory/lookup": recorded("lookup")}, ()) as (admin, coordinator, _):
        ids = list(range(1, 41))
        answer = await ask(admin, "lookup", {"model": MODEL, "prompt": ids, "cache_salt": "tenant-a"})
        [question] = asked(coordinator, "POST", "/directory/lookup")
        root = question.pop("model_name")
        assert root.endswith("tiny-model")  # as the engine calls what it has loaded
        assert question == {"world_size": 2, "token_ids": ids, "cache_salt": "tenant-a"}
        none = {"hbm_tokens": 0, "disk_tokens": 0}
        assert answer["coordinator"] == {
            "chunks": 2,
            "instances": [
                # Of its second chunk one rank lies in memory, the other in the shared store.
                {"instance": "w0", "hit_tokens": 32, "host_tokens": 16, "remote_tokens": 16, **none},
                {"instance": "w1", "hit_tokens": 16, "host_tokens": 0, "remote_tokens": 16, **none},
            ],
        }
        status, message = await refusal(admin, "prefetch", worker="worker-0", by="coordinator")
        assert (status, "--instance-id worker-0" in message) == (501, True)


async def test_pins_and_quotas_go_to_the_coordinator_and_its_counts_come_from_there() -> None:
    answers = {
        "GET /directory/stats": recorded("directory"),
        "GET /instances/usage": recorded("usage"),
        "GET /quota": recorded("quotas"),
        "GET /cache/pins?limit=1": recorded("pins"),
        "POST /cache/pins": recorded("pinned"),
        "DELETE /cache/pins": recorded("pinned"),
        "POST /directory/lookup": recorded("lookup"),
        "PUT /quota/tenant-a": recorded("quota_set"),
        "DELETE /quota/_default": recorded("quota_set"),
    }
    async with with_lmcache(answers) as (admin, coordinator, _):
        assert await ask(admin, "pin") == {"status": "pinned", "chunks": 2, "keys": 4, "held_tokens": 32}
        assert (await ask(admin, "unpin"))["status"] == "unpinned"
        assert asked(coordinator, "DELETE", "/cache/pins") == asked(coordinator, "POST", "/cache/pins")
        assert (await admin.put("/admin/cache/quota", params={"salt": "tenant-a", "limit_gb": 1.5})).status_code == 200
        assert asked(coordinator, "PUT", "/quota/tenant-a") == [{"limit_gb": 1.5}]
        assert (await admin.delete("/admin/cache/quota")).status_code == 200
        said = (await admin.get("/admin/cache/stats")).json()["coordinator"]
        assert said["directory"]["num_keys"] == 4
        assert said["pinned_keys"] == 4
        assert [quota["quota_limit_gb"] for quota in said["quotas"]["by_cache_salt"]] == [0.0, 1.5]


async def test_a_prefetch_is_left_to_lmcache_where_that_has_the_prompt_and_computed_where_it_has_not() -> None:
    answers: dict[str, Any] = {
        LOAD: LOADED,
        PROGRESS: {"request_id": "r1", "status": "completed", "total_keys": 4, "found_keys": 4},
    }
    async with with_lmcache(answers) as (admin, coordinator, _):
        done = await ask(admin, "prefetch", worker="worker-1")
        assert done == {"by": "coordinator", "worker": "worker-1", "chunks": 2, "total_keys": 4, "found_keys": 4}
        assert asked(coordinator, "POST", "/cache/prefetches")[0]["instance_id"] == "worker-1"
        answers[PROGRESS] = answers[PROGRESS] | {"found_keys": 0}
        done = await ask(admin, "prefetch", worker="worker-1")
        assert done["by"] == "warm-up"
        assert "nothing" in done["coordinator_problem"]
        answers[LOAD] = 502, {"detail": "prefetch submit to 'worker-1' failed: 503"}
        assert (await ask(admin, "prefetch", worker="worker-1"))["by"] == "warm-up"
        assert (await refusal(admin, "prefetch", worker="worker-1", by="coordinator"))[0] == 502


async def test_a_prompt_leaves_the_one_worker_only_once_the_other_has_all_of_it() -> None:
    answers: dict[str, Any] = {
        LOAD: LOADED,
        PROGRESS: {"request_id": "r1", "status": "completed", "total_keys": 4, "found_keys": 3},
        "POST /cache/delete": {"instance_id": "worker-0", "requested": 2, "affected": 4, "skipped": 0},
    }
    async with with_lmcache(answers) as (admin, coordinator, _):
        ends = {"source": "worker-0", "target": "worker-1"}
        assert (await ask(admin, "move", **ends))["status"] == "copied in part"
        assert not asked(coordinator, "POST", "/cache/delete")
        answers[PROGRESS] = answers[PROGRESS] | {"found_keys": 4}
        done = await ask(admin, "move", **ends)
        assert (done["status"], done["deleted_keys"]) == ("moved", 4)
        assert (await refusal(admin, "move", source="worker-1", target="worker-1"))[0] == 400
        [deletion] = asked(coordinator, "POST", "/cache/delete")
        assert (deletion["instance_id"], deletion["tier"]) == ("worker-0", "l1")


async def test_clear_empties_lmcaches_servers_too_or_deletes_one_prompt_from_them() -> None:
    deleted = {"instance_id": "worker-0", "requested": 2, "affected": 4, "skipped": 1}
    answers = {"POST /cache/delete": deleted, "POST /directory/lookup": recorded("lookup")}
    async with with_lmcache(answers, ("worker-0",)) as (admin, coordinator, server):
        rows = (await ask(admin, "clear", None))["workers"]
        assert [row["lmcache"] for row in rows] == ["cleared", None]
        assert asked(server, "POST", "/cache/clear") == [{"tier": "l1"}]
        rows = (await ask(admin, "clear"))["workers"]
        assert rows == [{"worker": "worker-0", "deleted_keys": 4, "kept_keys": 1}]
        answers["POST /directory/lookup"] = {"chunks": 0, "results": []}
        await ask(admin, "clear")
        # A server without lower tiers refuses to delete there, so it is not asked where nothing lies below.
        assert [each["tier"] for each in asked(coordinator, "POST", "/cache/delete")] == ["all", "l1"]


async def test_a_coordinator_that_is_away_spoils_nothing_that_does_not_need_it() -> None:
    nowhere = {"coordinator": "http://127.0.0.1:9"}
    async with fleet(workers=1, adapters=("sql",), cache_control=nowhere) as gateway, admin_of(gateway) as admin:
        assert "cannot be reached" in (await ask(admin, "lookup"))["coordinator"]["problem"]
        assert "cannot be reached" in (await admin.get("/admin/cache/stats")).json()["coordinator"]["problem"]
        assert (await ask(admin, "prefetch", worker="worker-0"))["by"] == "warm-up"
        [row] = (await ask(admin, "clear", None))["workers"]
        assert (row["engine"], row["index"]) == ("cleared", "cleared")
        assert "cannot be reached" in row["lmcache"]
        assert (await refusal(admin, "pin"))[0] == 502
        status, message = await refusal(admin, "pin", PROMPT | {"model": "sql"})
        assert (status, "adapters" in message) == (501, True)


async def nests_too_deeply(wire: Wire, _: Message) -> None:
    wire.send(response(b'{"x":%b%b}' % (b"[" * 10_000, b"]" * 10_000)))


@pytest.mark.parametrize("script", [answer(response(b"{}")), nests_too_deeply], ids=["empty", "nested"])
async def test_what_is_no_coordinator_is_told_from_one(script: Any) -> None:
    async with (
        FakeWorker(script) as other,
        fleet(workers=1, cache_control={"coordinator": other.url}) as gateway,
        admin_of(gateway) as admin,
    ):
        problem = "is no LMCache coordinator"
        assert problem in (await ask(admin, "lookup"))["coordinator"]["problem"]
        assert problem in (await admin.get("/admin/cache/stats")).json()["coordinator"]["problem"]
        assert problem in (await ask(admin, "clear", None))["workers"][0]["lmcache"]
        assert (await ask(admin, "prefetch", worker="worker-0"))["by"] == "warm-up"
        assert (await refusal(admin, "pin"))[0] == 502


# The command


async def kvway_cache(gateway: Gateway, *words: str | Path, text: str | None = None) -> Result:
    command = ["cache", *map(str, words), "--admin", f"http://127.0.0.1:{gateway.admin_port}"]
    return await asyncio.to_thread(CliRunner().invoke, app, command, input=text)


async def test_the_command_steers_a_running_fleet(gateway: Gateway, tmp_path: Path) -> None:
    plain = tmp_path / "prompt.txt"
    plain.write_text(STORY)
    done = await kvway_cache(gateway, "prefetch", plain, "--model", MODEL, "--worker", "worker-1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["worker"] == "worker-1"
    async with admin_of(gateway) as admin:
        tokens = await holds(admin, "worker-1")
    shown = await kvway_cache(gateway, "lookup", "--text", STORY)
    assert shown.exit_code == 0
    [row] = [line for line in shown.output.splitlines() if "worker-1" in line]
    assert f" {tokens} " in row
    messages = await kvway_cache(gateway, "lookup", "-", "--json", text='[{"role": "user", "content": "Hello"}]')
    assert json.loads(messages.output)["exact"] is True
    assert "worker-1" in (await kvway_cache(gateway, "stats")).output
    pinned = await kvway_cache(gateway, "pin", "--text", STORY)
    assert (pinned.exit_code, "cannot pin" in pinned.output) == (3, True)
    cleared = await kvway_cache(gateway, "clear", "--all")
    assert cleared.exit_code == 0, cleared.output
    assert (await kvway_cache(gateway, "clear")).exit_code == 2
    nothing = await kvway_cache(gateway, "clear", "--all", "--text", "")  # of a variable that is not set, perhaps
    assert (nothing.exit_code, "forget all prompts or none" in nothing.output) == (3, True)
    assert (await kvway_cache(gateway, "prefetch", "--text", STORY, "--worker", "nobody")).exit_code == 2
    assert (await kvway_cache(gateway, "lookup", tmp_path / "nothing")).exit_code == 2
    assert (await kvway_cache(gateway, "lookup")).exit_code == 2
