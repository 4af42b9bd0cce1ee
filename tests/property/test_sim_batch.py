"""Runs of steps come to what single steps come to: the same times, hits, preemptions and evictions."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.batch import BatchWorker
from sim.cache import BlockChain, CacheEvent, hash_blocks
from sim.jobs import BatchLimits, Job
from sim.profiles import find_profile
from sim.worker import Request, Worker, WorkerLimits

SIZE = 4
BLOCKS = 30
PROFILE = find_profile("llama-3.1-8b/h100/1")

# prompt and output tokens, which of three prefixes, milliseconds since the request before
requests = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 2), st.integers(0, 120)), min_size=1, max_size=14
)


@dataclass
class Fate:
    """What became of one request."""

    first_at: float = 0.0
    finished_at: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0


def chain_of(prompt: int, output: int, prefix: int) -> BlockChain:
    return hash_blocks(array("I", range(prefix * 1000, prefix * 1000 + prompt + output)), SIZE, "model")


def step_by_step(arrivals: list[tuple[float, tuple[int, int, int]]]) -> tuple[list[Fate], list[CacheEvent]]:
    worker = Worker(WorkerLimits(BLOCKS + 1, SIZE, max_batched_tokens=16, max_running=4), PROFILE)
    coming = [(at, Request(chain_of(*shape), shape[0], shape[1])) for at, shape in arrivals]
    fates = {request: Fate() for _, request in coming}
    events: list[CacheEvent] = []
    now = 0.0
    while coming or worker.waiting or worker.running:
        while coming and coming[0][0] <= now:
            worker.add(coming.pop(0)[1])
        step = worker.start(now)
        if step is None:
            now = coming[0][0]
            continue
        now += step.duration
        result = worker.finish(step)
        events += result.events
        for request in result.emitted:
            if request.generated == 1:
                fates[request].first_at = now
        for request in result.finished:
            fates[request].finished_at = now
            fates[request].cached_tokens = request.cached_tokens
            fates[request].preemptions = request.preemptions
    return list(fates.values()), events


def run_by_run(arrivals: list[tuple[float, tuple[int, int, int]]]) -> tuple[list[Fate], list[CacheEvent]]:
    worker = BatchWorker(BatchLimits(BLOCKS + 1, SIZE, SIZE, max_batched_tokens=16, max_running=4), PROFILE)
    coming = []
    for number, (at, shape) in enumerate(arrivals):
        chain = chain_of(*shape)
        coming.append((at, Job(number, chain, shape[0], shape[1], len(chain.hashes) * SIZE)))
    fates = [Fate() for _ in coming]
    events: list[CacheEvent] = []
    now, busy = 0.0, False
    while coming or worker.waiting or worker.running:
        while coming and coming[0][0] <= now:
            worker.add(coming.pop(0)[1], now)
        busy = busy or worker.start(now)
        if coming and coming[0][0] < worker.ends_at:
            now = coming[0][0]
            worker.add(coming.pop(0)[1], now)
            worker.cut(now)
            continue
        now = worker.ends_at
        first, done = worker.finish(now)
        busy = False
        events += worker.cache.take_events()
        for job in first:
            fates[job.number].first_at = now
        for job in done:
            fates[job.number].finished_at = now
            fates[job.number].cached_tokens = sum(job.hit_tokens)
            fates[job.number].preemptions = job.preemptions
    assert worker.cache.usage == 0
    return fates, events


@given(requests)
def test_runs_of_steps_are_steps(drawn):
    at = 0.0
    arrivals = []
    for *shape, gap_ms in drawn:
        at += gap_ms / 1000
        if shape[0] + shape[1] <= BLOCKS * SIZE:
            # off the boundaries of steps: which of two events at one instant comes first is not what is tested
            arrivals.append((at + 1.234567e-5, tuple(shape)))
    slow, fast = step_by_step(list(arrivals)), run_by_run(list(arrivals))
    for ours, theirs in zip(fast[0], slow[0], strict=True):
        assert ours.first_at == pytest.approx(theirs.first_at, abs=1e-9)
        assert ours.finished_at == pytest.approx(theirs.finished_at, abs=1e-9)
        assert (ours.cached_tokens, ours.preemptions) == (theirs.cached_tokens, theirs.preemptions)
    assert fast[1] == slow[1]
