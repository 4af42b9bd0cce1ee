"""A gateway without a list of workers, and ``kvway check`` of its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.check.findings import Level
from gateway.check.fleet import CheckOptions, check_fleet
from gateway.config import Config
from sim.server import SimWorker, WorkerSettings
from tests.integration.engine import until
from tests.kube import ApiServer, Object, pod

ANY = "tcp://*:0"


@contextlib.asynccontextmanager
async def engine(speed: float = 200) -> AsyncIterator[SimWorker]:
    async with SimWorker(WorkerSettings(model="tiny", speed=speed, kv_events=ANY, kv_replay=ANY)) as worker:
        yield worker


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


def pod_of(name: str, worker: SimWorker, **metadata: Any) -> Object:
    return pod(name, annotations={"kvway.io/port": worker.url.rpartition(":")[2]}, **metadata)


def config_for(server: ApiServer, **sections: Any) -> Config:
    kubernetes = [{"selector": "app=vllm", "namespaces": ["ai"], "api_url": server.url}]
    config = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 1},
        "discovery": {"kubernetes": kubernetes},
        "models": {"*": {"source": "bytes"}},
        "prompt": {"chunk_tokens": 16},
        "health": {"interval_s": 0.1},
        "log": {"requests": False, "level": "error"},
    }
    return Config.model_validate(config | sections)


async def test_a_gateway_that_starts_with_nobody_serves_who_comes_until_they_go(server: ApiServer) -> None:
    ask = {"model": "tiny", "prompt": "The lighthouse keeper wrote. " * 40, "max_tokens": 2}
    async with engine() as worker, Gateway(config_for(server)) as gateway, httpx.AsyncClient() as client:
        public, admin = (f"http://127.0.0.1:{port}" for port in (gateway.port, gateway.admin_port))
        assert (await client.get(f"{public}/ready")).status_code == 503
        refused = await client.post(f"{public}/v1/completions", json=ask)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")

        server.put(pod_of("vllm-0", worker, labels={"kvway.io/role": "decode"}))
        await until(lambda: gateway.registry.any_ready() and "tiny" in gateway.registry.model_names())
        assert (await client.get(f"{public}/ready")).status_code == 200
        answer = await client.post(f"{public}/v1/completions", json=ask)
        assert (answer.status_code, answer.headers["x-kvway-worker"]) == (200, "vllm-0")
        (described,) = (await client.get(f"{admin}/admin/workers")).json()
        assert (described["name"], described["role"]) == ("vllm-0", "decode")
        await until(lambda: gateway.feeds.stats["vllm-0"].batches > 0)  # its events were found, too

        metrics = (await client.get(f"{admin}/metrics")).text
        assert 'kvway_discovery_workers{source="kubernetes[0]"} 1.0' in metrics
        assert 'kvway_discovery_errors_total{source="kubernetes[0]"} 0.0' in metrics
        server.delete("vllm-0")
        await until(lambda: not gateway.registry.workers)
        assert (await client.get(f"{public}/ready")).status_code == 503


async def test_a_stream_on_a_terminating_pod_goes_on_to_its_end(server: ApiServer) -> None:
    ask = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with engine(speed=10) as worker, Gateway(config_for(server)) as gateway, httpx.AsyncClient() as client:
        server.put(pod_of("vllm-0", worker))
        await until(lambda: gateway.registry.any_ready() and "tiny" in gateway.registry.model_names())
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        async with client.stream("POST", url, json=ask) as response:
            lines = response.aiter_lines()
            await anext(lines)
            server.put(pod_of("vllm-0", worker, deletionTimestamp="2026-01-01T00:00:00Z"))
            await until(lambda: gateway.registry.workers["vllm-0"].state == "draining")
            refused = await client.post(url, json=ask)
            assert refused.status_code == 503
            server.delete("vllm-0")
            await until(lambda: not gateway.registry.workers)
            assert gateway.ledger.in_flight == 1
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        assert gateway.ledger.in_flight == 0


async def test_check_looks_at_what_is_found(server: ApiServer) -> None:
    options = CheckOptions(send_prompts=False, timeout_s=1.0)
    async with engine() as worker:
        server.put(pod_of("vllm-0", worker))
        server.put(pod("vllm-1", "127.0.0.2", ready=False))
        server.put(pod("vllm-2", "127.0.0.3", annotations={"kvway.io/port": "http"}))
        findings = await check_fleet(config_for(server), options)
    of_source = {each.check: each for each in findings if each.subject == "discovery.kubernetes[0]"}
    assert of_source["found"].message == "vllm-0, and 1 that may get no new requests"
    assert "kvway.io/port is 'http'" in of_source["usable"].message
    of_worker = {each.check: each.level for each in findings if each.subject == "vllm-0"}
    assert of_worker["reachable"] == of_worker["replay"] == Level.OK  # where it publishes it said itself


async def test_check_tells_of_engines_that_are_left_out_for_their_names(tmp_path: Path) -> None:
    for number, address in enumerate(("127.0.0.2", "127.0.0.3", "127.0.0.2")):
        (tmp_path / f"{number}.yaml").write_text(f"workers: [{{name: vllm-0, url: 'http://{address}:1'}}]")
    files = [{"path": tmp_path / f"{number}.yaml"} for number in range(3)]
    findings = await check_fleet(Config.model_validate({"discovery": {"files": files}}), CheckOptions(timeout_s=0.5))
    (double,) = [each for each in findings if each.check == "usable"]
    assert double.subject == "discovery.files[1]"
    assert double.message.startswith("http://127.0.0.3:1 is left out: http://127.0.0.2:1 is called vllm-0, too")


async def test_check_says_why_nothing_is_found(server: ApiServer, tmp_path: Path) -> None:
    server.refusal = 403, {}, "pods is forbidden"
    (tmp_path / "workers.yaml").write_text("workers: []")
    config = config_for(server)
    config = config.model_copy(
        update={
            "discovery": config.discovery.model_validate(
                config.discovery.model_dump() | {"files": [{"path": tmp_path / "workers.yaml"}]}
            )
        }
    )
    findings = await check_fleet(config, CheckOptions(timeout_s=1.0))
    assert [(each.subject, each.level) for each in findings] == [
        ("discovery.kubernetes[0]", Level.PROBLEM),
        ("discovery.files[0]", Level.PROBLEM),
    ]
    assert "give the service account a Role" in findings[0].message
    assert findings[1].message == "no workers"
