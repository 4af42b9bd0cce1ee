"""Upstream and routers of a run: started on their cores, stopped at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rig import Cores, Meter, Process
from tests.bench.routers import Peer, Place
from tests.processes import free_ports

HOST = "127.0.0.1"
WORKERS = 4


@dataclass(frozen=True)
class Target:
    """Something that answers requests: a router, or the upstream itself."""

    name: str
    address: tuple[str, int]
    process: Process
    meter: Meter


class Testbed:
    """Context manager around everything that was started."""

    def __init__(self, cores: Cores, directory: Path) -> None:
        self._cores = cores
        self._directory = directory
        self._ports = free_ports(WORKERS)
        self._routers = ExitStack()
        command = [sys.executable, "-m", "tests.bench.fast_upstream", *map(str, self._ports)]
        log = directory / "upstream.log"
        self._upstream = Process(command, {cores.load}, log, scheduler=os.SCHED_BATCH)
        self._upstream.wait_ready(f"http://{HOST}:{self._ports[-1]}/health")

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_routers()
        self._upstream.stop()

    def direct(self) -> Target:
        """Return the upstream as a target: what the load generator sees without a router."""
        meter = Meter(None, self._upstream, self._cores)
        return Target("direct", (HOST, self._ports[0]), self._upstream, meter)

    def start(self, peer: Peer, environ: Mapping[str, str] | None = None) -> Target:
        """Start a router on its cores and wait until it routes.

        Raises:
            StartFailed: it did not come up.
        """
        port, side_port = free_ports(2)
        directory = self._directory / peer.name
        directory.mkdir(exist_ok=True)
        place = Place(port, side_port, [f"http://{HOST}:{worker}" for worker in self._ports], directory)
        process = Process(peer.command(place), self._cores.router, directory / "log", environ=environ)
        self._routers.enter_context(process)
        process.wait_ready(f"http://{HOST}:{port}{peer.ready_path}")
        if self._upstream.popen.poll() is not None:
            raise SystemExit(f"the upstream ended: {self._upstream.last_lines()}")
        return Target(peer.name, (HOST, port), process, Meter(process, self._upstream, self._cores))

    def stop_routers(self) -> None:
        self._routers.close()
