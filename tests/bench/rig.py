"""Processes on cores of their own, and what they cost: CPU and memory from /proc."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
START_S = 60.0
STOP_S = 5.0


class StartFailed(Exception):
    """A process did not come up; the message ends with the last lines it printed."""


@dataclass(frozen=True)
class Cores:
    """Where what runs: the router on cores of its own, upstream and client together on another."""

    router: frozenset[int]
    load: int


def choose_cores(most: int) -> Cores:
    """Return the last core for the load, and up to ``most`` of the others for the router."""
    *others, load = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("the benchmark needs two cores: one for the router, one for load generator and upstream")
    return Cores(router=frozenset(others[:most]), load=load)


def become_load(core: int) -> None:
    """Pin this process, and those it starts, to a core, without preemption at each wake-up.

    Upstream and client share the core: under the ordinary scheduler every write of one switches to the other, and those
    switches, not the router, would be the limit.
    """
    _run_on({core}, os.SCHED_BATCH)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run_on(cores: Collection[int], scheduler: int) -> None:
    os.sched_setaffinity(0, cores)
    os.sched_setscheduler(0, scheduler, os.sched_param(0))


class Process:
    """A process with its children, pinned to cores, its output in a file.

    Pinned before it starts, so that runtimes which count their cores start one thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        cores: Collection[int],
        log: Path,
        *,
        scheduler: int = os.SCHED_OTHER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **(environ or {})},
                process_group=0,
                preexec_fn=functools.partial(_run_on, cores, scheduler),
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, url: str) -> None:
        """Poll ``url`` until it answers 200.

        Raises:
            StartFailed: the process ended, or a minute passed.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.popen.poll() is not None:
                raise StartFailed(f"ended with code {self.popen.returncode}: {self.last_lines()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                return
            time.sleep(0.1)
        raise StartFailed(f"{url} did not answer within {START_S:.0f} s: {self.last_lines()}")

    def cpu_s(self) -> float:
        """Return the CPU time, user and system, of the process and its children."""
        return sum(map(_cpu_s, self._pids()))

    def rss_bytes(self) -> int:
        return sum(map(_rss_bytes, self._pids()))

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_S)
                return

    def _pids(self) -> list[int]:
        pids = [self.popen.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                pids.extend(map(int, children))
        return pids

    def last_lines(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-4:])


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _rss_bytes(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[21]) * PAGE_BYTES if fields else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, or nothing when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(frozen=True)
class Usage:
    """What a stretch of time cost, in seconds of wall clock and of CPU.

    Attributes:
        router_s: CPU of the router.
        load_s: CPU of upstream and load generator.
        others_s: CPU that other programs took from the router's cores.
    """

    seconds: float
    router_s: float
    load_s: float
    others_s: float


class Meter:
    """Measures CPU between two moments; without a router, that of the load alone."""

    def __init__(self, router: Process | None, upstream: Process, cores: Cores) -> None:
        self._router = router
        self._upstream = upstream
        self._cores = cores
        self._start = self._now()

    def start(self) -> None:
        self._start = self._now()

    def usage(self) -> Usage:
        return Usage(*(after - before for after, before in zip(self._now(), self._start, strict=True)))

    def _now(self) -> tuple[float, float, float, float]:
        router_s = self._router.cpu_s() if self._router else 0.0
        load_s = self._upstream.cpu_s() + time.process_time()
        return time.perf_counter(), router_s, load_s, _busy_s(self._cores.router) - router_s


def _busy_s(cores: Collection[int]) -> float:
    """Return the seconds in which the cores were not idle, those that a hypervisor took included."""
    names = {f"cpu{core}" for core in cores}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _waiting, *rest = map(int, ticks[:8])
            busy += user + nice + system + sum(rest)
    return busy / TICKS_PER_S


@contextlib.contextmanager
def rss_samples(process: Process, every_s: float = 0.2) -> Iterator[list[int]]:
    """Sample the memory of a process while the block runs; the list holds the bytes of each sample."""
    samples = [process.rss_bytes()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every_s):
            samples.append(process.rss_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
