"""Eight workers that die, hang, refuse and cut streams, under a steady load: ``python -m tests.bench.chaos [--json]``.

Half of the workers are killed (SIGKILL) and restarted, one after another; the others hang, answer 503 together, and cut
their streams. Prompts go in pieces, so that these meet with all that as well. A request that had not begun to stream
must not fail, a stream must not end in silence, and when the load stops nothing may be counted as in flight. Exit code
1 when one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from tests.bench.chaos_fleet import Fleet
from tests.bench.routers import TOKENIZER
from tests.bench.workloads import Prompts, conversations
from tests.processes import free_ports, kvway, running, wait_for, write_config

WORKERS = 8
SPEED = 4.0
START_S = 30.0
PER_SECOND = 20
PROMPTS = Prompts(conversations=64, messages=8, characters=900, new_last_message=False)
OUTPUT_TOKENS = 60
PIECE_TOKENS = 512
LEAVING_SHARE = 0.1
SETTLE_S = 10.0
IN_FLIGHT = (
    "kvway_in_flight_requests",
    "kvway_worker_running",
    "kvway_worker_pending_prefill_tokens",
    "kvway_worker_decode_tokens",
)


class Load:
    """Clients that stream, and what became of them.

    Outcomes: ``completed``; ``left`` (the client went away, as told); ``cut`` (ended by an error event or a reset after
    it had begun); ``failed`` (no byte of an answer, or an error status); ``silent`` (ended as if complete, without
    ``[DONE]``).
    """

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._random = random.Random(1)
        self._prompts = [body["messages"] for body in conversations(PROMPTS)]
        self._client = httpx.AsyncClient(base_url=url, timeout=60.0, limits=httpx.Limits(max_connections=None))

    async def run(self, seconds: float) -> None:
        start = time.monotonic()
        async with self._client, asyncio.TaskGroup() as requests:
            for number in range(int(seconds * PER_SECOND)):
                await asyncio.sleep(start + number / PER_SECOND - time.monotonic())
                requests.create_task(self._request())

    async def _request(self) -> None:
        leaves_after = self._random.randrange(1, OUTPUT_TOKENS) if self._random.random() < LEAVING_SHARE else None
        body = {
            "model": "sim",
            "messages": self._random.choice(self._prompts),
            "max_tokens": OUTPUT_TOKENS,
            "stream": True,
        }
        lines: list[str] = []
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._failed(f"{response.status_code} {response.text}")
                    return
                async for line in response.aiter_lines():
                    if line:
                        lines.append(line)
                    if len(lines) == leaves_after:
                        self.outcomes["left"] += 1
                        return
        except httpx.HTTPError as error:
            if lines:
                self.outcomes["cut"] += 1
            else:
                self._failed(repr(error))
            return
        self._ended(lines)

    def _ended(self, lines: list[str]) -> None:
        if lines and lines[-1] == "data: [DONE]":
            self.outcomes["completed"] += 1
        elif lines and '"error"' in lines[-1]:
            self.outcomes["cut"] += 1
        else:
            self.outcomes["silent"] += 1

    def _failed(self, why: str) -> None:
        self.outcomes["failed"] += 1
        self.errors[why] += 1


async def kill_in_turn(fleet: Fleet) -> None:
    while True:
        for number in range(WORKERS // 2):
            await asyncio.sleep(1.0)
            await fleet.kill_and_restart(number, down_s=1.0)


async def misbehave_in_turn(fleet: Fleet) -> None:
    others = range(WORKERS // 2, WORKERS)
    while True:
        for number in others:
            await fleet.fault(number, "hang", seconds=4.0)
            await asyncio.sleep(5.0)
            await asyncio.gather(*(fleet.fault(other, "error503", seconds=1.0) for other in others))
            await asyncio.sleep(2.0)
            await fleet.fault(number, "cut", count=5, after_tokens=10)
            await asyncio.sleep(1.0)


async def under_faults(load: Load, fleet: Fleet, seconds: float) -> None:
    """Run the load while the fleet is tormented, then let the fleet recover."""
    async with asyncio.TaskGroup() as group:
        tormentors = [group.create_task(kill_in_turn(fleet)), group.create_task(misbehave_in_turn(fleet))]
        await load.run(seconds)
        for tormentor in tormentors:
            tormentor.cancel()


async def settled_counters(admin: str) -> tuple[dict[str, float], float]:
    """Return the in-flight gauges, once all are zero or after ten seconds, as sums over workers; and pieces sent."""
    deadline = time.monotonic() + SETTLE_S
    async with httpx.AsyncClient(base_url=admin) as client:
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            sums = {name: sum_of(lines, name) for name in IN_FLIGHT}
            if not any(sums.values()) or time.monotonic() > deadline:
                return sums, sum_of(lines, "kvway_dispatch_pieces_total")
            await asyncio.sleep(0.2)


def sum_of(lines: list[str], metric: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{metric} ", f"{metric}{{")))


def gateway_config(fleet: Fleet, port: int, admin_port: int) -> dict[str, Any]:
    """Timeouts and pieces below those of a real fleet, as its answers are quicker and its prompts shorter."""
    return {
        "server": {"host": "127.0.0.1", "port": port, "admin_port": admin_port},
        "workers": fleet.worker_configs(),
        "models": {"*": {"tokenizer": str(TOKENIZER)}},
        "dispatch": {"piece_tokens": PIECE_TOKENS},
        "timeouts": {"connect_s": 1.0, "header_s": 2.0, "idle_s": 2.0},
        "retries": {"max_attempts": 6},
        "health": {"interval_s": 0.5},
        "log": {"level": "error", "requests": False},
    }


async def run(seconds: float) -> dict[str, Any]:
    port, admin_port = free_ports(2)
    url, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
    with tempfile.TemporaryDirectory(prefix="kvway-chaos-") as folder:
        async with Fleet(WORKERS, speed=SPEED) as fleet:
            config = write_config(Path(folder), gateway_config(fleet, port, admin_port))
            with running(kvway("serve", "--config", config)) as gateway:
                wait_for(f"{url}/ready", gateway, START_S)
                load = Load(url)
                await under_faults(load, fleet, seconds)
                in_flight, pieces = await settled_counters(admin)
    outcomes = {name: load.outcomes[name] for name in ("completed", "left", "cut", "failed", "silent")}
    targets = {
        "none_failed_before_it_streamed": not outcomes["failed"],
        "no_stream_ended_in_silence": not outcomes["silent"],
        "counters_back_to_zero": not any(in_flight.values()),
        "prompts_went_in_pieces": pieces > 0,
    }
    return {
        "requests": sum(outcomes.values()),
        **outcomes,
        "faults": dict(fleet.faults),
        "in_flight": in_flight,
        "pieces": pieces,
        "errors": dict(load.errors),
        "targets": targets,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.chaos", description="kvway before failing workers")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the load (default 60)")
    options = parser.parse_args()
    result = asyncio.run(run(options.seconds))
    console = Console(stderr=options.json, highlight=False)
    for name, value in result.items():
        console.print(f"{name:<12}{value}")
    if options.json:
        print(json.dumps(result))
    sys.exit(not all(result["targets"].values()))


if __name__ == "__main__":
    main()
