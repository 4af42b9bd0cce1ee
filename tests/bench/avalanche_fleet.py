"""Clients of many tenants before the real gateway, while the worker that holds most of their prefixes is killed."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import httpx

from tests.bench.chaos_fleet import START_S, Fleet
from tests.processes import free_ports, kvway, running, wait_for, write_config

WORKERS = 4
SPEED = 0.25  # slow workers, so that what this machine takes for its work counts little beside what they take
TENANTS = 12
PREFIX_TOKENS = 4096
QUESTION_TOKENS = 128
OUTPUT_TOKENS = 1
PER_SECOND = 4.0
WARM_S = 30.0
QUIET_S = 4.0  # before the death
AFTER_S = 5.0
ANSWERED_S = 1.0  # requests of the last second before it may have met it
# The share is twelve times the default, so that what takes minutes is done at the first look. As that would be felt,
# death and measurements lie between the first two looks.
REPLICATION = {"interval_s": 25.0, "least_uses": 2, "prefill_share": 0.25}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got.

    Attributes:
        asked_at: monotonic seconds.
        tenant: whose prefix it began with.
        worker: who answered.
        ttft_s: seconds until its first token.
        cached_share: of its prompt.
    """

    asked_at: float
    tenant: int
    worker: str
    ttft_s: float
    cached_share: float


class Clients:
    """Clients that ask at a steady rate: every tenant once in a round, in an order of chance.

    Attributes:
        answers: what they got.
        failed: what they did not get, by why.
        late_s: how much later than it should a request was sent, at most: on a busy machine, times mean little.
    """

    def __init__(self, url: str) -> None:
        self.answers: list[Answer] = []
        self.failed: Counter[str] = Counter()
        self.late_s = 0.0
        self._random = Random(1)
        self._number = 0
        self._client = httpx.AsyncClient(base_url=url, timeout=60.0, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        await self._client.aclose()

    async def ask_for(self, seconds: float) -> None:
        """Ask for so long, and wait for the answers."""
        start, asked = monotonic(), 0
        async with asyncio.TaskGroup() as requests:
            while asked < seconds * PER_SECOND:
                for tenant in self._random.sample(range(TENANTS), TENANTS):
                    due_at = start + asked / PER_SECOND
                    await asyncio.sleep(due_at - monotonic())
                    self.late_s = max(self.late_s, monotonic() - due_at)
                    requests.create_task(self._ask(tenant))
                    asked += 1

    async def _ask(self, tenant: int) -> None:
        self._number += 1
        prompt = [1000 + tenant] * PREFIX_TOKENS + [5000 + self._number % 10_000] * QUESTION_TOKENS
        body = {"model": "sim", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}
        body["stream_options"] = {"include_usage": True}
        asked_at, first_at, usage = monotonic(), 0.0, None
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                worker = response.headers.get("x-kvway-worker", "")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        first_at = first_at or monotonic()
                        usage = json.loads(line[6:]).get("usage") or usage
        except httpx.HTTPError as error:
            self.failed[type(error).__name__] += 1
            return
        if usage is None:
            self.failed[f"status {response.status_code}, no usage"] += 1
            return
        share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
        self.answers.append(Answer(asked_at, tenant, worker, first_at - asked_at, share))

    def richest(self) -> str:
        """Return the worker that answered most tenants last."""
        last = {answer.tenant: answer.worker for answer in self.answers}
        return Counter(last.values()).most_common(1)[0][0]


async def run_fleet(replicated: bool) -> dict[str, Any]:
    """Kill a worker under load.

    Returns:
        ``before`` and ``after``: the answers to requests of ``QUIET_S`` before and ``AFTER_S`` after the death;
        ``failed`` and ``late_s``: of ``Clients``; ``warm_ups``: how many were completed before the death.
    """
    port, admin_port = free_ports(2)
    url, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
    with tempfile.TemporaryDirectory(prefix="kvway-avalanche-") as folder:
        async with Fleet(WORKERS, speed=SPEED) as fleet:
            entries = fleet.worker_configs()
            config = write_config(Path(folder), _config(entries, port, admin_port, replicated))
            with running(kvway("serve", "--config", config)) as gateway:
                wait_for(f"{url}/ready", gateway, START_S)
                clients = Clients(url)
                await clients.ask_for(WARM_S)
                warm_ups = await _completed_warm_ups(admin)
                dying = [entry["name"] for entry in entries].index(clients.richest())
                clients.answers, clients.late_s = [], 0.0
                async with asyncio.TaskGroup() as group:
                    group.create_task(clients.ask_for(QUIET_S + AFTER_S))
                    await asyncio.sleep(QUIET_S)
                    died_at = monotonic()
                    await asyncio.to_thread(fleet.kill, dying)
                await clients.close()
    before = [answer for answer in clients.answers if answer.asked_at < died_at - ANSWERED_S]
    after = [answer for answer in clients.answers if died_at <= answer.asked_at < died_at + AFTER_S]
    found = {"failed": dict(clients.failed), "late_s": clients.late_s, "warm_ups": warm_ups}
    return {"before": before, "after": after, **found}


def _config(entries: list[dict[str, Any]], port: int, admin_port: int, replicated: bool) -> dict[str, Any]:
    for number, entry in enumerate(entries):
        entry["name"] = f"worker-{number}"
    return {
        "server": {"host": "127.0.0.1", "port": port, "admin_port": admin_port},
        "workers": entries,
        "replication": REPLICATION | {"enabled": replicated},
        "health": {"interval_s": 0.5},
        "log": {"level": "error", "requests": False},
    }


async def _completed_warm_ups(admin: str) -> int:
    async with httpx.AsyncClient(base_url=admin) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    name = 'kvway_replication_warmups_total{outcome="completed"} '
    return sum(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))
