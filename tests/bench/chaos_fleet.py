"""A fleet of simulated workers that can be killed, restarted and told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections import Counter
from typing import Any

import httpx

from tests.bench.routers import TOKENIZER
from tests.processes import ROOT, free_ports, kvway

START_S = 60.0


class Fleet:
    """Context manager around its processes.

    Attributes:
        faults: how often each kind was brought about.
    """

    def __init__(self, size: int, speed: float) -> None:
        self._ports = [free_ports(3) for _ in range(size)]
        self._speed = speed
        self._processes: list[subprocess.Popen[bytes]] = []
        # A connection per call: workers close idle ones, and some of them lie dead.
        self._client = httpx.AsyncClient(timeout=5.0, limits=httpx.Limits(max_keepalive_connections=0))
        self.faults: Counter[str] = Counter()

    async def __aenter__(self) -> Fleet:
        self._processes = [self._spawn(number) for number in range(len(self._ports))]
        try:
            await asyncio.gather(*map(self._until_healthy, range(len(self._ports))))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def worker_configs(self) -> list[dict[str, Any]]:
        return [
            {
                "url": f"http://127.0.0.1:{http}",
                "kv_events": {
                    "endpoint": f"tcp://127.0.0.1:{events}",
                    "replay_endpoint": f"tcp://127.0.0.1:{replay}",
                },
            }
            for http, events, replay in self._ports
        ]

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()
        self.faults["kill"] += 1

    async def kill_and_restart(self, number: int, down_s: float) -> None:
        self.kill(number)
        await asyncio.sleep(down_s)
        self._processes[number] = self._spawn(number)
        await self._until_healthy(number)

    async def fault(self, number: int, kind: str, **parameters: float) -> None:
        response = await self._client.post(f"{self._url(number)}/sim/fault", json={"kind": kind, **parameters})
        response.raise_for_status()
        self.faults[kind] += 1

    async def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        await self._client.aclose()

    def _url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._ports[number][0]}"

    def _spawn(self, number: int) -> subprocess.Popen[bytes]:
        http, events, replay = self._ports[number]
        command = kvway(
            *("worker", "--port", str(http), "--speed", str(self._speed), "--tokenizer", TOKENIZER),
            *("--kv-events", f"tcp://127.0.0.1:{events}", "--kv-replay", f"tcp://127.0.0.1:{replay}"),
        )
        return subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    async def _until_healthy(self, number: int) -> None:
        async with asyncio.timeout(START_S):
            while True:
                if (code := self._processes[number].poll()) is not None:
                    raise RuntimeError(f"worker {number} ended with code {code} as it started")
                with contextlib.suppress(httpx.HTTPError):
                    if (await self._client.get(f"{self._url(number)}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.1)
