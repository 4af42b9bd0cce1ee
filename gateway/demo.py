"""``kvway demo``: the same workload through the same fleet twice, once per policy, so that the difference can be seen.

Four simulated workers and the gateway run as processes of their own, as in production; only the GPUs are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from policies.chunks import ChunkHasher
from sim.ports import free_ports
from sim.tokens import WorkerTokenizer
from sim.workload import Session, Turn, coding_agents, read_agent_text

POLICIES = ("round-robin", "expected-cost")
MODEL = "demo"
MODEL_FILES = Path(__file__).parent.parent / "sim" / "data" / "tiny-model"
BLOCK_TOKENS = 16
THINK_S = 4.0  # mean pause of an agent between answer and next request, on the workers' clock
CHUNK_TOKENS = 128
START_ATTEMPTS = 3
STREAM_INTERVAL = 8  # tokens per chunk: fewer wake-ups, for six processes that may share two cores
LOAD_OF_CAPACITY = 0.8  # working set as a share of the fleet's cache: below, every policy hits; far above, none does
# Shares of the fleet's cache as (HBM, host DRAM): two workers with HBM only, and two whose host keeps copies of what
# is cached in HBM and goes on to keep them when HBM lets go, so that the larger tier is what such a worker can hold.
TIERS = ((0.25, 0.0), (0.25, 0.0), (0.15, 0.25), (0.15, 0.25))


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What ``kvway demo`` may vary.

    Attributes:
        sessions: agent sessions of the bundled workload.
        turns: requests per session.
        speed: how many times faster than a GPU the workers' clocks run.
        texts: folder with recorded agent sessions, used where it exists.
        seed: of the bundled workload.
    """

    sessions: int = 28
    turns: int = 9
    speed: float = 4.0
    texts: Path | None = None
    seed: int = 0


@dataclass(slots=True)
class Result:
    """What one policy did with the workload. Times in seconds of the workers' clock."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return the figures that are printed."""
        p50, p90, p99 = np.percentile(self.ttfts or [0.0], (50, 90, 99))
        return {
            "requests": self.requests,
            "failed": self.failed,
            "hit_rate": round(self.cached_tokens / max(1, self.prompt_tokens), 4),
            "ttft_p50": round(float(p50), 4),
            "ttft_p90": round(float(p90), 4),
            "ttft_p99": round(float(p99), 4),
        }


def load_sessions(options: DemoOptions) -> list[Session]:
    """Return the bundled sessions, and the recorded ones where there are any."""
    sessions = coding_agents(options.sessions, options.turns, options.seed, think_s=THINK_S)
    if options.texts is not None:
        sessions += read_agent_text(options.texts, options.turns, think_s=THINK_S)
    return sessions


def infinite_cache(sessions: Iterable[Session], tokenizer: WorkerTokenizer) -> tuple[float, int, int]:
    """Return what one cache without end would do with the workload: token hit rate, and tokens it would hold.

    Like the engine it hits whole blocks only, and never a prompt's last token. The third is the longest request, its
    answer included: as many tokens have to fit into any cache.
    """
    hasher = ChunkHasher(BLOCK_TOKENS)
    root = hasher.root(MODEL)
    known: set[bytes] = set()
    hits = total = longest = 0
    for session in sessions:
        for turn in session.turns:
            tokens = tokenizer.encode_body(turn.body)
            blocks = hasher.chain(root, np.asarray(tokens, np.uint32).tobytes())
            usable = blocks[: (len(tokens) - 1) // BLOCK_TOKENS]
            total += len(tokens)
            longest = max(longest, len(tokens) + turn.body["max_tokens"])
            hits += BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(known.__contains__, usable))
            known.update(blocks)
    return hits / max(1, total), len(known) * BLOCK_TOKENS, longest


def fleet_tokens(working_set: int, longest: int) -> int:
    """Return the tokens that all caches hold together, so that the smallest HBM takes the longest request."""
    smallest = min(hbm for hbm, _ in TIERS)
    return max(round(working_set / LOAD_OF_CAPACITY), math.ceil((longest + BLOCK_TOKENS) / smallest))


async def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the workload under every policy.

    Args:
        options: size and speed.
        console: where the progress bar goes.

    Returns:
        ``{"bound": …, "<policy>": {"requests", "failed", "hit_rate", "ttft_p50", "ttft_p90", "ttft_p99"}, …}``, seconds
        on the workers' clock.
    """
    sessions = load_sessions(options)
    bound, working_set, longest = infinite_cache(sessions, WorkerTokenizer(MODEL_FILES))
    capacity = fleet_tokens(working_set, longest)
    answer: dict[str, Any] = {"bound": round(bound, 4)}
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        requests = sum(len(session.turns) for session in sessions)
        tasks = {policy: progress.add_task(policy, total=requests, start=False) for policy in POLICIES}
        for policy in POLICIES:
            async with _fleet(policy, capacity, options.speed) as url:
                progress.start_task(tasks[policy])
                result = await _play(sessions, url, options.speed, lambda task=tasks[policy]: progress.advance(task))
            answer[policy] = result.summary()
    return answer


def print_result(answer: dict[str, Any], console: Console) -> None:
    """Print the table that the README shows."""
    table = Table(title="The same workload, the same four workers, two policies")
    for column in ("policy", "requests", "failed", "hit rate", "TTFT p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for policy in POLICIES:
        row = answer[policy]
        times = [f"{row[key]:.3f} s" for key in ("ttft_p50", "ttft_p90", "ttft_p99")]
        table.add_row(policy, str(row["requests"]), str(row["failed"]), f"{row['hit_rate']:.1%}", *times)
    console.print(table)
    console.print(f"One cache without end would hit {answer['bound']:.1%}; times are on the workers' clock.")


class DemoFailed(Exception):
    """The fleet did not come up."""


@contextlib.asynccontextmanager
async def _fleet(policy: str, capacity: int, speed: float) -> AsyncIterator[str]:
    """Start the workers and a gateway; yield the gateway's URL once it is ready.

    Raises:
        DemoFailed: a process ended at start, or the fleet was not ready within a minute, several times over.
    """
    with tempfile.TemporaryDirectory() as folder:
        for attempts_left in reversed(range(START_ATTEMPTS)):
            # Ports that are free now may be taken by the time a process binds them: then try others.
            url, admin, commands = _commands(policy, capacity, speed, Path(folder))
            processes = [
                await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway.cli", *command, stdout=DEVNULL)
                for command in commands
            ]
            try:
                await _until_ready(admin, len(TIERS), processes)
                break
            except DemoFailed:
                await _end(processes)
                if attempts_left == 0:
                    raise
        try:
            yield url
        finally:
            await _end(processes)


def _commands(policy: str, capacity: int, speed: float, folder: Path) -> tuple[str, str, list[list[str]]]:
    """Return the gateway's public and admin URL, and the command lines of the workers and the gateway."""
    ports = free_ports(2 + 3 * len(TIERS))
    public, admin = ports[:2]
    workers, commands = [], []
    for number, (hbm, host) in enumerate(TIERS):
        port, events, replay = ports[2 + 3 * number : 5 + 3 * number]
        published = {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
        flags = {
            "--host": "127.0.0.1",
            "--port": port,
            "--model": MODEL,
            "--tokenizer": MODEL_FILES,
            "--block-size": BLOCK_TOKENS,
            "--capacity-tokens": round(hbm * capacity),
            "--host-tokens": round(host * capacity),
            "--speed": speed,
            "--stream-interval": STREAM_INTERVAL,
            "--kv-events": published["endpoint"],
            "--kv-replay": published["replay_endpoint"],
        }
        commands.append(["worker", *(str(word) for flag in flags.items() for word in flag)])
        workers.append(
            {
                "name": f"worker-{number}",
                "url": f"http://127.0.0.1:{port}",
                "kv_events": published,
                "kv_capacity_tokens": round(max(hbm, host) * capacity),
            }
        )
    config = {
        "server": {"host": "127.0.0.1", "port": public, "admin_port": admin, "drain_s": 1},
        "workers": workers,
        "models": {MODEL: {"tokenizer": str(MODEL_FILES)}},
        "prompt": {"chunk_tokens": CHUNK_TOKENS},
        "policy": {"name": policy},
        "log": {"level": "warning", "requests": False},
    }
    file = folder / "kvway.yaml"
    file.write_text(yaml.safe_dump(config))
    commands.append(["serve", "--config", str(file)])
    return f"http://127.0.0.1:{public}", f"http://127.0.0.1:{admin}", commands


async def _end(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    await asyncio.gather(*(process.wait() for process in processes))


async def _until_ready(admin: str, workers: int, processes: list[asyncio.subprocess.Process]) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            if any(process.returncode is not None for process in processes):
                raise DemoFailed("a worker or the gateway ended at start; its message is above")
            with contextlib.suppress(httpx.HTTPError):
                answer = (await client.get(f"{admin}/admin/workers")).json()
                if sum(worker["state"] == "ready" for worker in answer) == workers:
                    return
            await asyncio.sleep(0.1)
    raise DemoFailed("the fleet was not ready within a minute")


async def _play(sessions: list[Session], url: str, speed: float, advance: Any) -> Result:
    """Play all sessions at once, each turn after the answer to the one before it."""
    result = Result()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def play(session: Session) -> None:
            for turn in session.turns:
                await asyncio.sleep(turn.think_s / speed)
                await _send(client, turn, speed, result)
                advance()

        await asyncio.gather(*(play(session) for session in sessions))
    return result


async def _send(client: httpx.AsyncClient, turn: Turn, speed: float, result: Result) -> None:
    body = turn.body | {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    result.requests += 1
    started, first, usage = time.perf_counter(), 0.0, None
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", turn.path, json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {") or response.status_code != 200:
                    continue
                first = first or time.perf_counter()
                if '"usage":{' in line.replace(" ", ""):
                    usage = msgspec.json.decode(line[6:]).get("usage") or usage
    if usage is None:
        result.failed += 1
        return
    result.ttfts.append((first - started) * speed)
    result.prompt_tokens += usage["prompt_tokens"]
    result.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
