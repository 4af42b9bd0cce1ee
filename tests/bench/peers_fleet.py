"""One cell of ``tests.bench.peers``: a workload at a share of the fleet's capacity, through one router."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, BinaryIO

import httpx
import numpy as np

from policies.chunks import ChunkHasher
from sim.load.scenario import Scenario, read_scenario
from sim.profiles import find_profile
from sim.requests import SimRequest, Trace
from sim.tokens import WorkerTokenizer
from tests.bench.routers import TOKENIZER, Peer, Place
from tests.processes import ROOT, free_ports, kvway, wait_for, write_config

WORKERS = 4
MODEL = "sim"
PROFILE = "llama-3.1-70b/h100/4"
BLOCK_TOKENS = 64
CACHE_SHARE = 0.8  # of the fleet's KV cache is what the workload's prompts fill when each block lies in one worker
DECODING = 16  # requests that decode together, in the calculation of capacity
TOKEN_S = 0.017  # nominal time between tokens, a step of so many, for when later turns arrive
SENT_SHARE = 0.75  # of the requests are due when sending ends: after that, few conversations are left
USERS = 400  # conversations at a time; far above what is ever in flight
START_S = 60.0
STOP_S = 5.0


@dataclass(frozen=True)
class Workload:
    """A workload as it is sent, and what it asks of the fleet.

    Attributes:
        source: for ``kvway load``.
        seed: likewise.
        requests: how many.
        nominal_per_s: requests per second as it arrives without scaling, in the middle half of the requests.
        capacity_per_s: requests per second at which all workers are busy all the time if nothing is computed twice:
            every prompt costs the prefill of what no request before had, every output token a 16th of a step of 16.
        capacity_tokens: KV cache of a worker.
        sent_s: seconds, without scaling, after which nothing more is sent.
        limit: TTFT and hit rate of the requests that are due before that, when each finds all that any request before
            it had, and waits for nobody. Keys as in what ``play`` returns. Hit rates can be a point above it: engines
            have smaller blocks, and whose answers come sooner is sent more of the long prompts of later turns.
    """

    name: str
    source: str
    seed: int
    requests: int
    nominal_per_s: float
    capacity_per_s: float
    capacity_tokens: int
    sent_s: float
    limit: dict[str, float]

    def load(self, share: float) -> float:
        """Return how many times faster than nominal the workload arrives at a share of the capacity."""
        return share * self.capacity_per_s / self.nominal_per_s


def read_workload(name: str, source: str, seed: int = 0) -> Workload:
    """Tokenize a workload and calculate what it asks of the fleet."""
    trace = tokenized(read_scenario(source, seed, loop="sessions"), name)
    number = len(trace.requests)
    early_s, late_s = np.quantile([request.arrival_s for request in trace.requests], (0.25, SENT_SHARE))
    known = {chunk for request in trace.requests for chunk in request.chunks}
    capacity = round(len(known) * BLOCK_TOKENS / CACHE_SHARE / WORKERS)
    return Workload(
        name,
        source,
        seed,
        number,
        nominal_per_s=number * (SENT_SHARE - 0.25) / float(late_s - early_s),
        capacity_per_s=WORKERS * number / busy_s(trace),
        capacity_tokens=capacity,
        sent_s=float(late_s),
        limit=limit(trace, float(late_s)),
    )


def tokenized(scenario: Scenario, name: str) -> Trace:
    """Return a scenario as a trace of tokens, at its nominal times."""
    tokenizer, hasher = WorkerTokenizer(TOKENIZER), ChunkHasher(BLOCK_TOKENS)
    root, ids = hasher.root(MODEL), dict[bytes, int]()
    requests = []
    for number, unit in enumerate(scenario.units):
        arrival_s = unit.due_s
        for turn in unit.turns:
            _, body = scenario.request(turn.number)
            tokens = np.asarray(tokenizer.encode_body(body), np.uint32)
            chunks = [ids.setdefault(chunk, len(ids)) for chunk in hasher.chain(root, tokens.tobytes())]
            arrival_s += turn.think_s
            requests.append(SimRequest(arrival_s, chunks, len(tokens), body["max_tokens"], str(number), turn.think_s))
            arrival_s += body["max_tokens"] * TOKEN_S
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(requests, BLOCK_TOKENS, closed_loop=True, name=name)


def busy_s(trace: Trace) -> float:
    """Return the seconds for which the workload keeps one worker with an endless cache busy."""
    profile, seconds = find_profile(PROFILE), 0.0
    for request, new in zip(trace.requests, new_tokens(trace), strict=True):
        context = request.prompt_tokens + request.output_tokens // 2
        seconds += profile.ttft_s(new, request.prompt_tokens - new)
        seconds += request.output_tokens * profile.itl_s(DECODING, DECODING * context) / DECODING
    return seconds


def limit(trace: Trace, sent_s: float) -> dict[str, float]:
    """Return ``Workload.limit`` of a trace of which only what is due within ``sent_s`` seconds is sent."""
    profile = find_profile(PROFILE)
    sent = [
        (each.prompt_tokens, new)
        for each, new in zip(trace.requests, new_tokens(trace), strict=True)
        if each.arrival_s <= sent_s
    ]
    ttft_s = [profile.ttft_s(new, prompt - new) for prompt, new in sent]
    p50_s, p90_s, p99_s = np.percentile(ttft_s, (50, 90, 99)).tolist()
    prompts, computed = (sum(tokens) for tokens in zip(*sent, strict=True))
    return {"ttft_p50_s": p50_s, "ttft_p90_s": p90_s, "ttft_p99_s": p99_s, "hit_rate": 1 - computed / prompts}


def new_tokens(trace: Trace) -> Iterator[int]:
    """Yield for each request how many tokens of its prompt no request before had."""
    known = set[int]()
    for request in trace.requests:
        new = sum(chunk not in known for chunk in request.chunks) * trace.block_tokens
        known.update(request.chunks)
        yield max(1, min(request.prompt_tokens, new + request.prompt_tokens % trace.block_tokens))


def kvway_router(policy: str, name: str) -> Peer:
    """Return kvway with KV events of the workers and a policy; ``Place.directory`` holds the workers' entries."""

    def command(place: Place) -> list[str]:
        config = {
            "server": {"host": "127.0.0.1", "port": place.port, "admin_port": place.side_port, "drain_s": 1},
            "workers": json.loads((place.directory / "workers.json").read_text()),
            "models": {"*": {"tokenizer": str(TOKENIZER)}},
            "policy": {"name": policy},
            "log": {"level": "warning", "requests": False},
        }
        return [str(word) for word in kvway("serve", "--config", write_config(place.directory, config))]

    return Peer(name, "", command, "/ready")


def play(router: Peer, workload: Workload, share: float) -> dict[str, Any]:
    """Run a workload at a share of the capacity through a router, with a new fleet.

    Returns:
        What ``kvway load`` found.

    Raises:
        RuntimeError: something did not start, or the load test did not run.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, side_port, *ports = free_ports(2 + 3 * WORKERS)
        log = stack.enter_context((folder / "log").open("wb"))
        entries = [_worker(ports[3 * number : 3 * number + 3], workload) for number in range(WORKERS)]
        workers = [stack.enter_context(_running(command, log)) for _, command in entries]
        for (entry, _), process in zip(entries, workers, strict=True):
            wait_for(f"{entry['url']}/health", process, START_S)
        (folder / "workers.json").write_text(json.dumps([entry for entry, _ in entries]))
        place = Place(port, side_port, [entry["url"] for entry, _ in entries], folder)
        process = stack.enter_context(_running(router.command(place), log))
        wait_for(f"http://127.0.0.1:{port}{router.ready_path}", process, START_S)
        if not router.package:
            _wait_for_workers(f"http://127.0.0.1:{side_port}/admin/workers")
        return _load(workload, share, f"http://127.0.0.1:{port}")


def _worker(ports: Sequence[int], workload: Workload) -> tuple[dict[str, Any], list[str]]:
    """Return a worker's entry in ``kvway.yaml``, and its command line."""
    http, events, replay = ports
    published = {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    flags = {
        "--port": http,
        "--model": MODEL,
        "--tokenizer": TOKENIZER,
        "--profile": PROFILE,
        "--capacity-tokens": workload.capacity_tokens,
        "--stream-interval": 8,
        "--kv-events": published["endpoint"],
        "--kv-replay": published["replay_endpoint"],
    }
    url = f"http://127.0.0.1:{http}"
    entry = {"url": url, "kv_events": published, "kv_capacity_tokens": workload.capacity_tokens}
    return entry, [str(word) for word in kvway("worker", *(str(word) for flag in flags.items() for word in flag))]


@contextlib.contextmanager
def _running(command: Sequence[str], log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends; what it prints goes into the log."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_workers(admin: str) -> None:
    deadline = monotonic() + START_S
    while [each["state"] for each in httpx.get(admin).json()] != ["ready"] * WORKERS:
        if monotonic() > deadline:
            raise RuntimeError(f"{admin}: the workers did not become ready within {START_S:.0f} s")
        sleep(0.1)


def _load(workload: Workload, share: float, url: str) -> dict[str, Any]:
    load = workload.load(share)
    words = (
        "load",
        workload.source,
        "--loop",
        "sessions",
        "--load",
        str(load),
        "--duration",
        str(workload.sent_s / load),
    )
    options = ("--users", str(USERS), "--seed", str(workload.seed), "--url", url, "--model", MODEL, "--json")
    done = subprocess.run(kvway(*words, *options), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"kvway load ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
