"""``kvway check`` against real workers, each misconfigured in one way: it says what is wrong and what mends it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import yaml
from rich.console import Console
from typer.testing import CliRunner

from gateway.check.findings import Finding, Level, as_data, has_problems, print_findings
from gateway.check.fleet import CheckOptions, check_fleet
from gateway.cli import app
from gateway.config import Config, WorkerConfig
from sim.server import Fault, SimWorker, WorkerSettings
from tests.events_rig import free_endpoint, without_ipv6
from tests.lmcache import peer
from tests.prompt_rig import reference, save
from tests.sim_clients import TINY
from tests.valkey import Valkey, cluster_url, valkey_cluster

ANY = "tcp://127.0.0.1:0"
TIMEOUT_S = 0.5


@asynccontextmanager
async def simulated(**settings: Any) -> AsyncIterator[SimWorker]:
    defaults = {"model": "tiny", "speed": 100.0, "kv_events": ANY, "kv_replay": ANY}
    async with SimWorker(WorkerSettings(**defaults | settings)) as worker:
        yield worker


def config_of(worker: SimWorker, **changes: Any) -> Config:
    """A configuration that is right for ``worker``, but for ``changes``."""
    publisher = worker.publisher
    entry: dict[str, Any] = {"url": worker.url, "name": "w"}
    if publisher is not None:
        entry["kv_events"] = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    entry |= changes.pop("entry", {})
    models = {"*": {"source": "engine"}}
    return Config.model_validate({"workers": [entry], "models": models, "prompt": {"chunk_tokens": 64}} | changes)


async def findings_of(config: Config, **options: Any) -> list[Finding]:
    return await check_fleet(config, CheckOptions(**{"timeout_s": TIMEOUT_S} | options))


def problems(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings if finding.level is Level.PROBLEM}


async def test_a_fleet_that_is_set_up_well_has_no_problems() -> None:
    async with simulated(tokenizer=TINY) as worker:
        findings = await findings_of(config_of(worker, models={"*": {"tokenizer": TINY}}))
    assert not problems(findings)
    assert {"reachable", "models", "block_size", "tokenizer", "template", "direction", "topic", "sequence"} <= {
        finding.check for finding in findings if finding.level is Level.OK
    }
    assert {"shape", "content", "replay", "clock", "usage", "overlap", "metrics"} <= {
        finding.check for finding in findings if finding.level is Level.OK
    }


@pytest.mark.parametrize(
    ("settings", "changes", "check", "mend"),
    [
        ({"prompt_tokens_details": False}, {}, "usage", "--enable-prompt-tokens-details"),
        ({"block_size": 48}, {}, "block_size", "prompt.chunk_tokens to 96"),
        ({}, {"entry": {"models": ["another"]}}, "models", "--served-model-name"),
        ({"kv_events": None, "kv_replay": None}, {"entry": {"kv_events": {"endpoint": ANY}}}, "events", "tcp://*:"),
        ({}, {"entry": {"kv_events": None}}, "events", "kv_events: {endpoint: tcp://127.0.0.1:"),
        ({}, {"models": {}}, "tokenizer", "models.tiny.tokenizer"),
        ({}, {"models": {"*": {"tokenizer": TINY}}}, "tokenizer", "models.tiny.tokenizer"),
    ],
)
async def test_what_is_wrong_is_named_with_the_flag_that_mends_it(
    settings: dict[str, Any], changes: dict[str, Any], check: str, mend: str
) -> None:
    async with simulated(**settings) as worker:
        found = problems(await findings_of(config_of(worker, **changes)))
    assert mend in found[check].mend


async def test_an_engine_that_keeps_no_prefixes_shows_it_in_three_ways() -> None:
    async with simulated(prefix_caching=False) as worker:
        found = problems(await findings_of(config_of(worker)))
    assert list(found) == ["prefix_caching", "overlap", "events"]
    assert "--enable-prefix-caching" in found["prefix_caching"].mend
    assert "--enable-prefix-caching" in found["overlap"].mend
    assert "--kv-events-config" in found["events"].mend


async def test_a_worker_that_does_not_answer_is_all_that_is_said_of_it() -> None:
    async with simulated() as worker:
        config = config_of(worker)
    findings = await findings_of(config)
    assert [(finding.check, finding.level) for finding in findings] == [("reachable", Level.PROBLEM)]


async def test_a_worker_that_hangs_is_not_waited_for() -> None:
    async with simulated(faults=(Fault(kind="hang"),)) as worker:
        found = problems(await findings_of(config_of(worker)))
    assert list(found) == ["reachable"]
    assert "0.5 s" in found["reachable"].message


async def test_workers_that_refuse_requests_are_told_apart_from_those_without_a_cache() -> None:
    async with simulated(faults=(Fault(kind="error503"),)) as worker:
        found = problems(await findings_of(config_of(worker)))
    assert "503" in found["overlap"].message


def kv_events_of(worker: SimWorker, **changes: Any) -> dict[str, Any]:
    assert worker.publisher is not None
    right = {"endpoint": worker.publisher.endpoint, "replay_endpoint": worker.publisher.replay_endpoint}
    return {"entry": {"kv_events": right | changes}}


@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        (lambda _: {"endpoint": free_endpoint()}, "direction", "the engine's is at"),
        (lambda worker: {"endpoint": worker.publisher.replay_endpoint}, "direction", "no publisher is bound"),
        (lambda _: {"endpoint": free_endpoint(), "mode": "bind"}, "direction", "no publisher connects"),
        (lambda _: {"topic": "kv@other"}, "topic", "'kv@here' does not begin with 'kv@other'"),
        (lambda _: {"replay_endpoint": free_endpoint()}, "replay", "does not answer"),
        (lambda worker: {"replay_endpoint": worker.publisher.endpoint}, "replay", "does not answer"),
    ],
)
async def test_events_that_cannot_arrive_are_explained(
    changes: Callable[[SimWorker], dict[str, Any]], check: str, said: str
) -> None:
    async with simulated(kv_topic="kv@here") as worker:
        found = problems(await findings_of(config_of(worker, **kv_events_of(worker, **changes(worker)))))
    assert said in found[check].message
    assert "--kv-events-config" in found[check].mend or "kv_events.topic" in found[check].mend


@pytest.mark.skipif(without_ipv6(), reason="this machine has no IPv6")
async def test_events_come_from_ipv6_addresses_too() -> None:
    async with simulated(kv_events="tcp://[::1]:0", kv_replay="tcp://[::1]:0") as worker:
        assert not problems(await findings_of(config_of(worker)))


async def test_a_publisher_that_connects_is_heard_where_kvway_binds() -> None:
    endpoint = free_endpoint()
    async with simulated(kv_events=endpoint, kv_connect=True) as worker:
        findings = await findings_of(config_of(worker, **kv_events_of(worker, mode="bind")), timeout_s=3.0)
    assert not problems(findings)


async def test_a_publisher_that_connects_is_not_found_where_kvway_connects_too() -> None:
    async with simulated(kv_events=free_endpoint(), kv_connect=True) as worker:
        found = problems(await findings_of(config_of(worker)))
    assert "since its endpoint has no *" in found["direction"].message
    assert '"endpoint": "tcp://*:' in found["direction"].mend


async def test_an_endpoint_that_the_gateway_is_bound_to_is_no_problem() -> None:
    async with simulated() as worker:
        assert worker.publisher is not None
        config = config_of(worker, **kv_events_of(worker, endpoint=worker.publisher.endpoint, mode="bind"))
        findings = await findings_of(config)
    assert not problems(findings)
    assert any(finding.check == "events" and "bound already" in finding.message for finding in findings)


async def test_events_of_another_worker_are_not_taken_for_its_own() -> None:
    async with simulated() as worker, simulated() as other:
        assert other.publisher is not None
        config = config_of(worker, **kv_events_of(worker, endpoint=other.publisher.endpoint))
        found = problems(await findings_of(config))
    assert "no event came" in found["events"].message


async def test_old_event_shapes_are_recognised() -> None:
    async with simulated(event_format="array", replay_format="plain") as worker:
        findings = {finding.check: finding for finding in await findings_of(config_of(worker))}
    assert "arrays" in findings["shape"].message
    assert "3 frames" in findings["replay"].message


async def test_a_template_that_differs_is_told_apart_from_the_tokenizer(tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    async with simulated(tokenizer=TINY) as worker:
        models = {"*": {"tokenizer": TINY, "chat_template": template}}
        found = problems(await findings_of(config_of(worker, models=models)))
    assert list(found) == ["template"]
    assert "models.tiny.chat_template" in found["template"].mend


@pytest.mark.parametrize("renders", [True, False])
async def test_a_model_without_a_template_is_compared_with_what_the_engine_would_run(
    renders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's ``/tokenize`` renders gpt-oss with its template, which is not how its chats are run."""
    monkeypatch.setattr("gateway.prompt.harmony.openai_harmony", None)  # as without the extra
    (save(reference(), tmp_path) / "config.json").write_text('{"model_type": "gpt_oss"}')
    answers: dict[str, Any] = {
        "GET /health": {},
        "GET /v1/models": {"data": [{"id": "tiny"}]},
        "POST /tokenize": {"tokens": [1, 2, 3]},
    }
    if renders:
        answers["POST /v1/chat/completions/render"] = {"token_ids": [4, 5, 6]}
    async with peer(answers) as worker:
        config = {"workers": [{"url": worker.url, "name": "w"}], "models": {"*": {"tokenizer": str(tmp_path)}}}
        findings = await findings_of(Config.model_validate(config), send_prompts=False)
    found = [finding for finding in findings if finding.check == "template"]
    assert [finding.level for finding in found] == [Level.OK if renders else Level.NOTE] * 3
    assert all(("the engine's" if renders else "--enable-scale-out") in finding.message for finding in found)


async def test_clocks_that_differ_are_noticed() -> None:
    async with simulated() as worker:
        found = problems(await findings_of(config_of(worker), clock=lambda: time.time() + 60))
    assert "behind" in found["clock"].message


async def test_nothing_is_sent_where_that_is_not_wanted() -> None:
    async with simulated() as worker:
        findings = await findings_of(config_of(worker), send_prompts=False)
        assert worker.engine.worker.counters.prefix_queries == 0
    assert not problems(findings)
    assert not {"overlap", "usage"} & {finding.check for finding in findings}


async def test_workers_of_one_role_need_a_partner_with_their_protocol() -> None:
    sglang: dict[str, Any] = {"pd": "sglang", "kv_events": None, "kv_replay": None}
    async with simulated(role="prefill", **sglang) as first, simulated(role="decode", **sglang) as second:
        config = config_of(first)
        alike = [worker_of(first, "p", role="prefill", pd="sglang"), worker_of(second, "d", role="decode", pd="sglang")]
        findings = await findings_of(config.model_copy(update={"workers": tuple(alike)}))
        assert not problems(findings)  # nor are they sent prompts that they would refuse
        assert [finding.message for finding in findings if finding.check == "role"] == [
            "prefill by sglang, with d",
            "decode by sglang, with p",
        ]
        apart = [alike[0], worker_of(second, "d", role="decode", pd="nixl")]
        findings = await findings_of(config.model_copy(update={"workers": tuple(apart)}), send_prompts=False)
        found = [finding.message for finding in findings if finding.check == "role"]
        assert found == [
            "prefill by sglang, and no decode worker does so: d by nixl",
            "decode by nixl, and no prefill worker does so: p by sglang",
        ]
        assert "role" in problems(findings)


@pytest.mark.parametrize("usage", [7, [1], {"prompt_tokens": [1]}, {"prompt_tokens_details": [1]}])
async def test_a_usage_of_another_shape_reports_nothing(usage: Any) -> None:
    answers = {
        "GET /health": {},
        "GET /v1/models": {"data": [{"id": "tiny"}]},
        "POST /v1/completions": {"usage": usage},
        "POST /tokenize": {"tokens": [1, 2, 3]},
    }
    async with peer(answers) as worker:
        config = {"workers": [{"url": worker.url, "name": "w"}], "models": {"*": {"tokenizer": str(TINY)}}}
        found = problems(await findings_of(Config.model_validate(config)))
    assert "cached_tokens" in found["usage"].message


def worker_of(worker: SimWorker, name: str, **settings: Any) -> WorkerConfig:
    return WorkerConfig.model_validate({"url": worker.url, "name": name, **settings})


async def test_redis_is_looked_at_where_it_is_used() -> None:
    with Valkey() as valkey:
        async with simulated() as worker:
            findings = await findings_of(config_of(worker, index={"backend": "redis", "url": valkey.url}))
    redis = {finding.check: finding.level for finding in findings if finding.subject == "redis"}
    assert redis["reachable"] == redis["version"] == redis["namespace"] == Level.OK


async def test_redis_out_of_reach_or_forbidden_is_a_problem() -> None:
    with Valkey(user="default on nopass ~others:* &* +@all") as valkey:
        async with simulated() as worker:
            index = {"backend": "redis", "url": valkey.url}
            forbidden = problems(await findings_of(config_of(worker, index=index)))
            valkey.kill()
            gone = problems(await findings_of(config_of(worker, index=index)))
    assert "~kvway:*" in forbidden["namespace"].mend
    assert "index.url" in gone["reachable"].mend


@pytest.mark.parametrize(
    ("server", "mend"),
    [
        ({"maxmemory": 1}, "maxmemory-policy allkeys-lru"),
        ({"min-replicas-to-write": 1}, "a primary that takes writes"),
        ({"user": "default on nopass ~* &* +@all -eval"}, "+@all"),
        ({"user": "default on nopass ~* &* +@all -bitfield"}, "+@all"),
        ({"user": "default on nopass ~* resetchannels &others:* +@all"}, "&kvway:news"),
    ],
    ids=["it is full", "it takes no writes", "no scripts", "a command of ours is missing", "no channel"],
)
async def test_a_redis_that_lets_us_do_only_some_of_what_we_do_is_a_problem(server: dict[str, Any], mend: str) -> None:
    with Valkey(**server) as valkey:
        async with simulated() as worker:
            findings = await findings_of(config_of(worker, index={"backend": "redis", "url": valkey.url}))
    assert mend in problems(findings)["namespace"].mend


async def test_each_check_is_a_replica_of_its_own_as_the_others_would_miss_what_one_had_told() -> None:
    with Valkey() as valkey, redis.Redis.from_url(valkey.url) as admin, admin.pubsub() as heard:
        heard.subscribe("kvway:news")
        async with simulated() as worker:
            for _ in range(2):
                await findings_of(config_of(worker, index={"backend": "redis", "url": valkey.url}))
        told = [message for _ in range(3) if (message := heard.get_message(timeout=5))]
    replicas = {msgspec.msgpack.decode(message["data"])[0] for message in told if message["type"] == "message"}
    assert len(replicas) == 2


async def test_a_node_of_a_cluster_taken_for_a_server_is_a_problem_and_the_cluster_is_none() -> None:
    with valkey_cluster() as nodes:
        async with simulated() as worker:
            alone = await findings_of(config_of(worker, index={"backend": "redis", "url": nodes[0].url}))
            whole = await findings_of(config_of(worker, index={"backend": "redis", "url": cluster_url(nodes)}))
    assert f"redis+cluster://127.0.0.1:{nodes[0].port}" in problems(alone)["topology"].mend
    assert not problems(whole)


async def test_what_is_written_to_look_at_redis_is_gone_within_seconds() -> None:
    with Valkey() as valkey:
        async with simulated() as worker:
            await findings_of(config_of(worker, index={"backend": "redis", "url": valkey.url}))
        with redis.Redis.from_url(valkey.url) as admin:
            assert all(key.startswith(b"kvway:check:") and 0 < admin.ttl(key) <= 20 for key in admin.keys("*"))


async def test_findings_are_data_and_a_page() -> None:
    findings = [Finding("w", "usage", Level.PROBLEM, "no [details]", "--flag '{}'"), Finding("w", "x", Level.OK, "y")]
    assert has_problems(findings)
    assert as_data(findings)["findings"][0] == {
        "subject": "w",
        "check": "usage",
        "level": "problem",
        "message": "no [details]",
        "mend": "--flag '{}'",
    }
    console = Console(width=80, record=True, file=io.StringIO())
    print_findings(findings, console)
    page = console.export_text()
    assert "no [details]" in page
    assert "→ --flag '{}'" in page
    assert "1 problem\n" in page


def test_the_command_exits_with_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "kvway.yaml"
    file.write_text(yaml.safe_dump({"workers": [{"url": "http://127.0.0.1:9", "name": "gone"}]}))
    result = CliRunner().invoke(app, ["check", "-c", str(file), "--json", "--timeout", "1"])
    assert result.exit_code == 1
    assert json.loads(result.output)["findings"][0]["subject"] == "gone"
    file.write_text("workers: 3")
    assert CliRunner().invoke(app, ["check", "-c", str(file)]).exit_code == 2
