"""SIGHUP to ``kvway serve``: what the file says now, at no request's expense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.events.changes import ChunkRun
from gateway.fleet.registry import NO_SLOT
from policies.base import Tier
from tests.events_rig import until
from tests.gateway_rig import MODEL, STORY, entries, fleet, sim_workers
from tests.processes import free_ports, kvway, running, write_config

START_S = 40
ASK = {"model": MODEL, "prompt": STORY, "max_tokens": 4}
ROUND_ROBIN, PREFIX_HASH = {"name": "round-robin"}, {"name": "prefix-hash", "params": {"load_factor": 8}}


@dataclass
class Service:
    """A running ``kvway serve`` and its ``kvway.yaml``."""

    process: subprocess.Popen[bytes]
    folder: Path
    config: dict[str, Any]
    admin_ports: list[int]
    client: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=30))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config['server']['port']}"

    def log(self, message: str) -> list[dict[str, Any]]:
        """Return the lines so far whose message begins so."""
        lines = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        return [line for line in lines if line["message"].startswith(message)]

    async def hang_up(self, message: str = "the configuration was read again", **sections: Any) -> dict[str, Any]:
        """Change sections of the file, send SIGHUP, and return what is first logged about it."""
        self.config |= sections
        write_config(self.folder, self.config)
        seen = len(self.log(message))
        self.process.send_signal(signal.SIGHUP)
        await until(lambda: len(self.log(message)) > seen)
        return self.log(message)[seen]

    async def admin(self, path: str, number: int = 0) -> Any:
        return (await self.client.get(f"http://127.0.0.1:{self.admin_ports[number]}/admin/{path}")).json()

    async def default_policies(self) -> list[str]:
        described = [await self.admin("policy", number) for number in range(len(self.admin_ports))]
        return [each["default"]["name"] for each in described]

    async def put_policy(self, **change: Any) -> None:
        await self.client.put(f"http://127.0.0.1:{self.admin_ports[0]}/admin/policy", json=change)

    async def workers_of(self, requests: int) -> list[str]:
        """Ask for the same thing so often, one after the other, and return who answered."""
        answers = [await self.client.post(f"{self.url}/v1/completions", json=ASK) for _ in range(requests)]
        assert {answer.status_code for answer in answers} == {200}
        return [answer.headers["x-kvway-worker"] for answer in answers]

    async def is_up(self) -> bool:
        """Whether all processes have a ready worker and know of each other."""
        assert self.process.poll() is None
        for port in self.admin_ports:
            try:
                metrics = (await self.client.get(f"http://127.0.0.1:{port}/metrics")).text
                workers = (await self.client.get(f"http://127.0.0.1:{port}/admin/workers")).json()
            except httpx.HTTPError:
                return False
            alone = len(self.admin_ports) == 1
            joined = alone or f"kvway_replicas {len(self.admin_ports)}.0\n" in metrics
            if not joined or any(worker["state"] != "ready" or not worker["models"] for worker in workers):
                return False
        return True


@contextlib.asynccontextmanager
async def service(folder: Path, workers: list[dict[str, Any]], processes: int = 1) -> AsyncIterator[Service]:
    port, *admin_ports = free_ports(1 + processes)
    config = {
        "server": {"host": "127.0.0.1", "port": port, "admin_port": admin_ports[0], "drain_s": 2},
        "workers": workers,
        "models": {"*": {"source": "bytes"}},
        "policy": ROUND_ROBIN,
        "log": {"requests": False},
    }
    command = kvway("serve", "-c", write_config(folder, config), "--processes", str(processes))
    with running(["sh", "-c", 'exec 2>"$0"; exec "$@"', folder / "log", *command]) as process:
        served = Service(process, folder, config, admin_ports)
        async with served.client:
            await until(served.is_up, within_s=START_S)
            yield served


async def test_another_policy_decides_about_who_comes_next_and_nobody_else_notices(tmp_path: Path) -> None:
    numbers, done = count(), asyncio.Event()
    statuses: list[int] = []

    async def ask_until_done(served: Service) -> None:
        while not done.is_set():
            body = ASK | {"prompt": f"{next(numbers) % 5} {STORY}", "stream": True}
            answer = await served.client.post(f"{served.url}/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
            statuses.append(answer.status_code)

    async with sim_workers(2) as workers, service(tmp_path, entries(workers, "w")) as served:
        assert len(set(await served.workers_of(4))) == 2
        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(ask_until_done(served))
            for policy in (PREFIX_HASH, ROUND_ROBIN, PREFIX_HASH):
                seen = len(statuses)
                line = await served.hang_up(policy=policy)
                assert (line["level"], line["needs_restart"]) == ("info", "")
                assert line["taken_over"] == "policy.name, policy.params.load_factor"
                assert await served.default_policies() == [policy["name"]]
                await until(lambda seen=seen: len(statuses) >= seen + 4)
            done.set()
        assert set(statuses) == {200} and len(statuses) == next(numbers)
        assert len(set(await served.workers_of(4))) == 1


async def test_a_mistake_changes_nothing_and_other_keys_are_named(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service(tmp_path, entries(workers, "w")) as served:
        wrong = {"policy": {"name": "stiky"}, "workers": [], "health": {"intervall_s": 1}}
        line = await served.hang_up("SIGHUP changes nothing", **wrong)
        assert line["level"] == "error"
        assert f"{tmp_path}/kvway.yaml: policy: unknown policy 'stiky'" in line["message"]
        assert "; " in line["message"] and "kvway.yaml: unknown key 'health.intervall_s'" in line["message"]
        assert await served.default_policies() == ["round-robin"]

        right = {"policy": {"name": "random"}, "workers": entries(workers, "w"), "health": {"interval_s": 3}}
        line = await served.hang_up(**right, index={"password": "hidden"})
        assert (line["level"], line["taken_over"]) == ("warning", "policy.name")
        assert line["needs_restart"] == "index.password, health.interval_s"
        assert "hidden" not in (tmp_path / "log").read_text()
        in_force = await served.admin("config")
        assert (in_force["policy"]["name"], in_force["health"]["interval_s"]) == ("random", 2.0)
        assert await served.workers_of(1) == ["w0"]


async def test_a_policy_set_by_call_stays_until_the_file_has_another_one(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service(tmp_path, entries(workers, "w")) as served:
        await served.put_policy(name="sticky")
        await served.hang_up(models={"*": {"source": "bytes", "policy": {"name": "random"}}})
        assert await served.default_policies() == ["sticky"]
        await served.hang_up(policy=PREFIX_HASH)
        assert await served.default_policies() == ["prefix-hash"]


async def test_workers_join_and_leave_and_their_streams_go_on(tmp_path: Path) -> None:
    ask = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with sim_workers(2, speed=10) as workers:
        first, second = entries(workers, "w")
        async with (
            service(tmp_path, [first]) as served,
            served.client.stream("POST", f"{served.url}/v1/completions", json=ask) as response,
        ):
            assert response.headers["x-kvway-worker"] == "w0"
            lines = response.aiter_lines()
            await anext(lines)
            assert (await served.hang_up(workers=[second]))["taken_over"] == "workers"
            assert [worker["name"] for worker in await served.admin("workers")] == ["w1"]
            await until(served.is_up)
            assert await served.workers_of(2) == ["w1", "w1"]
            assert "data: [DONE]" in [line async for line in lines]


async def test_a_worker_that_is_said_to_read_a_pool_is_counted_to_hold_what_is_there() -> None:
    async with fleet(workers=2) as gateway:
        alone, *others = gateway.config.workers
        member = alone.model_copy(update={"pool": "shared"})
        gateway.take_over(gateway.config.model_copy(update={"workers": (member, *others)}))
        await until(lambda: gateway.registry.workers[alone.label].slot != NO_SLOT)
        pool = gateway.feeds.pools.named("shared")
        assert pool is not None
        await pool.write("somebody", [ChunkRun(Tier.REMOTE, b"chunk", [b"chunk"])], [])
        slots = [gateway.registry.workers[entry.label].slot for entry in (member, *others)]
        residency = await gateway.services.index.residency([b"chunk"], slots, 32)
        assert residency.hit_tokens.tolist() == [32, 0]


@pytest.mark.slow
async def test_all_processes_take_over_and_so_does_one_that_is_started_anew(tmp_path: Path) -> None:
    async with sim_workers(1) as workers, service(tmp_path, entries(workers, "w"), processes=2) as served:
        family = set(_children(served.process.pid))
        for pid in family:
            os.kill(pid, signal.SIGHUP)  # is the supervisor's, and means nothing to them
        line = await served.hang_up(policy=PREFIX_HASH, health={"interval_s": 3})
        assert line["needs_restart"] == "health.interval_s"
        await until(lambda: _are(served, "prefix-hash"))
        assert set(_children(served.process.pid)) == family and len(family) == 3
        assert await served.workers_of(1) == ["w0"]

        await served.hang_up("SIGHUP changes nothing", policy={"name": "stiky"})
        victim = next(pid for pid in family if "gateway.processes" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(family - set(_children(served.process.pid))) == 1)
        await until(served.is_up, within_s=START_S)
        assert await served.default_policies() == ["prefix-hash"] * 2


async def _are(served: Service, policy: str) -> bool:
    return set(await served.default_policies()) == {policy}


def _children(pid: int) -> Iterator[int]:
    return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
