"""A whole fleet with its gateways, simulated from event to event.

``simulate`` is the entry point. Events lie in one heap, ordered by time and then by when they were made, so that equal
seeds give equal runs. Workers report when their present run of steps ends (``sim.batch``); whatever reaches one before
that cuts the run short. Policies are those of ``policies``, called as the gateway calls them (``sim.router``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

import numpy as np

from policies.base import N_TIERS
from sim.batch import BatchWorker
from sim.cache import BlockChain
from sim.fleet import FleetSettings
from sim.index import FleetIndex
from sim.jobs import BatchLimits, Job
from sim.requests import Trace, named_tokens
from sim.results import SimResult
from sim.router import Dispatch, Router, make_policy
from sim.sampling import Samples
from sim.tiers import TierChange, make_stacks

Progress = Callable[[int, int], None]
"""Called now and then with the requests answered so far, and all of them."""

PROGRESS_STEPS = 200


def simulate(
    trace: Trace,
    fleet: FleetSettings,
    policy_name: str = "expected-cost",
    policy_params: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> SimResult:
    """Run a trace through a fleet under a policy.

    Args:
        trace: the requests; times that are to be jittered or scaled are so already.
        fleet: workers, tiers, and what the gateway does not know.
        policy_name: as in the gateway's ``policy.name``.
        policy_params: as in the gateway's ``policy.params``.
        seed: for policies that draw lots. Equal arguments give equal results.
        on_progress: told how far it is.

    Returns:
        One row per request, samples of the workers, totals.

    Raises:
        ValueError: the trace or the fleet cannot be simulated; the message says why.
        PolicyError: unknown policy or parameters (a ``ValueError`` too).
    """
    trace.check()
    _check_fit(trace, fleet)
    return _Simulation(trace, fleet, policy_name, policy_params, seed, on_progress).run()


def _check_fit(trace: Trace, fleet: FleetSettings) -> None:
    size = trace.block_tokens
    if size % fleet.block_tokens:
        raise ValueError(
            f"trace {trace.name!r} names blocks of {size} tokens: not a multiple of the engine's {fleet.block_tokens}"
        )
    most = fleet.capacity_tokens // size
    for number, request in enumerate(trace.requests):
        if -(-(request.prompt_tokens + request.output_tokens) // size) > most:
            raise ValueError(
                f"trace {trace.name!r}, request {number}: {request.prompt_tokens} + {request.output_tokens} tokens do "
                f"not fit the {fleet.capacity_tokens} tokens of a worker's HBM; raise capacity_tokens"
            )


@dataclass(slots=True, eq=False)
class _Live:
    """A request between its arrival and its last token."""

    job: Job
    router: int
    dispatch: Dispatch


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        fleet: FleetSettings,
        policy_name: str,
        policy_params: Mapping[str, Any] | None,
        seed: int,
        on_progress: Progress | None,
    ) -> None:
        self.trace = trace
        self.settings = fleet
        self.policy_name = policy_name
        self.on_progress = on_progress
        size = trace.block_tokens
        self.limits = BatchLimits(
            fleet.capacity_tokens // size + 1, size, fleet.block_tokens, fleet.max_batched_tokens, fleet.max_running
        )
        self.workers = [
            BatchWorker(self.limits, fleet.speed, tiers, fleet.eviction) for tiers in make_stacks(fleet, size)
        ]
        self.up = list(range(fleet.workers))
        gateway = fleet.gateway
        self.index = FleetIndex(fleet.workers)
        self.routers = [
            Router(
                make_policy(policy_name, policy_params, seed + replica),
                fleet,
                FleetIndex(fleet.workers) if gateway.approximate else self.index,
                size,
            )
            for replica in range(gateway.replicas)
        ]
        self.now = 0.0
        self.live: dict[int, _Live] = {}
        self.done = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()
        self._next_of: dict[int, int] = _next_turns(trace) if trace.closed_loop else {}
        self._samples = Samples(fleet.workers, fleet.sample_s)
        self._scrape_at = 0.0
        n = len(trace.requests)
        self.arrival_s = np.full(n, np.nan)
        self.ttft_s = np.full(n, np.nan)
        self.wait_s = np.full(n, np.nan)
        self.finish_s = np.full(n, np.nan)
        self.itl_s = np.full(n, np.nan)
        self.hit_tokens = np.zeros((n, N_TIERS), np.int64)
        self.expected = np.zeros(n, np.int64)
        self.worker = np.full(n, -1)

    def run(self) -> SimResult:
        self._schedule_arrivals()
        heap = self._heap
        while heap and self.done < len(self.finish_s):
            at, _, action, argument = heappop(heap)
            if at >= self._samples.due_at or at >= self._scrape_at:
                self._observe(at)
            self.now = at
            action(argument)
        return self._result()

    def at(self, when: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Have ``action(argument)`` called at simulated time ``when``."""
        heappush(self._heap, (when, next(self._numbers), action, argument))

    def _schedule_arrivals(self) -> None:
        followers = set(self._next_of.values())
        for number, request in enumerate(self.trace.requests):
            if number not in followers:
                self.at(request.arrival_s, self._arrive, number)

    def _arrive(self, number: int) -> None:
        self.arrival_s[number] = self.now
        gateway = self.settings.gateway
        delay = gateway.overhead_s + gateway.tokenize_s_per_token * self.trace.requests[number].prompt_tokens
        if delay:
            self.at(self.now + delay, self._route, number)
        else:
            self._route(number)

    def _route(self, number: int) -> None:
        request, size = self.trace.requests[number], self.trace.block_tokens
        replica = number % len(self.routers)
        dispatch = self.routers[replica].route(request, self.up, self.now)
        self._tell_others(replica, lambda router: router.hear_dispatch(number, dispatch.flight, self.now))
        self.expected[number] = dispatch.expected_hit_tokens
        job = Job(
            number,
            BlockChain(request.chunks),
            request.prompt_tokens,
            request.output_tokens,
            named_tokens(request, size),
            pin_s=self.settings.eviction.tool_ttl_s if request.tool_call else 0.0,
        )
        self.live[number] = _Live(job, replica, dispatch)
        worker = self.workers[dispatch.worker]
        worker.add(job, self.now)
        if worker.ends_at == inf:
            self._start(dispatch.worker)
        else:
            ends_at = worker.ends_at
            worker.cut(self.now)
            if worker.ends_at != ends_at:
                self.at(worker.ends_at, self._run_ended, dispatch.worker)

    def _start(self, row: int) -> None:
        worker = self.workers[row]
        if worker.start(self.now):
            self.at(worker.ends_at, self._run_ended, row)
        elif (wake_at := worker.wake_at()) < inf:
            self.at(wake_at, self._wake, row)
        self._publish(worker.take_changes())

    def _wake(self, row: int) -> None:
        if self.workers[row].ends_at == inf:
            self._start(row)

    def _run_ended(self, row: int) -> None:
        worker = self.workers[row]
        if worker.ends_at != self.now:  # it was cut short, and has ended already
            return
        first, done = worker.finish(self.now)
        for job in first:
            self._answer(job)
        for job in done:
            self._end(job)
        self._start(row)

    def _answer(self, job: Job) -> None:
        number, live = job.number, self.live[job.number]
        self.ttft_s[number] = self.now - self.arrival_s[number]
        self.routers[live.router].first_byte(live.dispatch, self.now)
        self._tell_others(live.router, lambda router: router.hear_first_byte(number, self.now))

    def _end(self, job: Job) -> None:
        number, live = job.number, self.live.pop(job.number)
        self.routers[live.router].end(live.dispatch, self.now)
        self._tell_others(live.router, lambda router: router.hear_end(number, self.now))
        self.finish_s[number] = self.now
        self.wait_s[number] = job.started_at - self.arrival_s[number]
        self.worker[number] = live.dispatch.worker
        self.hit_tokens[number] = job.hit_tokens
        if job.output_tokens > 1:
            self.itl_s[number] = (self.now - job.first_at) / (job.output_tokens - 1)
        self.done += 1
        total = len(self.trace.requests)
        if self.on_progress is not None and (self.done % max(1, total // PROGRESS_STEPS) == 0 or self.done == total):
            self.on_progress(self.done, total)
        following = self._next_of.get(number)
        if following is not None:
            self.at(self.now + self.trace.requests[following].think_s, self._arrive, following)

    def _tell_others(self, replica: int, news: Callable[[Router], None]) -> None:
        lag = self.settings.gateway.sync_lag_s
        if len(self.routers) == 1 or lag == inf:
            return
        for other, router in enumerate(self.routers):
            if other != replica:
                self.at(self.now + lag, news, router)

    def _publish(self, changes: list[TierChange]) -> None:
        """Let the gateways know, in time, how caches have changed."""
        gateway = self.settings.gateway
        if not changes or gateway.approximate:
            return
        if gateway.event_lag_s:
            self.at(self.now + gateway.event_lag_s, self._learn, changes)
        else:
            self._learn(changes)

    def _learn(self, changes: list[TierChange]) -> None:
        for change in changes:
            if change.stored:
                self.index.store(change.worker, change.hashes, change.tier)
            else:
                self.index.remove(change.worker, change.hashes, change.tier)

    def _observe(self, until: float) -> None:
        """Take the samples and scrapes that are due before ``until``; nothing has changed since the last event."""
        while self._samples.due_at <= until:
            self._samples.take(self.workers, self.routers)
        if self._scrape_at <= until:
            interval = self.settings.gateway.metrics_s
            self._scrape_at += interval * (1 + (until - self._scrape_at) // interval)
            for router in self.routers:
                for row, worker in enumerate(self.workers):
                    router.fleet.engine_running[row] = len(worker.running)
                    router.fleet.engine_waiting[row] = len(worker.waiting)
                    router.fleet.kv_usage[row] = worker.cache.usage

    def _result(self) -> SimResult:
        requests = self.trace.requests
        finished = self.finish_s[np.isfinite(self.finish_s)]
        return SimResult(
            policy=self.policy_name,
            trace=self.trace.name,
            arrival_s=self.arrival_s,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            wait_s=self.wait_s,
            finish_s=self.finish_s,
            prompt_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
            output_tokens=np.array([request.output_tokens for request in requests], np.int64),
            hit_tokens=self.hit_tokens,
            expected_hit_tokens=self.expected,
            worker=self.worker,
            **self._samples.arrays(),
            counters={
                "preemptions": float(sum(worker.preemptions for worker in self.workers)),
                "evictions": float(sum(worker.evictions for worker in self.workers)),
            },
            duration_s=float(finished.max(initial=0.0) - np.nanmin(self.arrival_s)) if len(finished) else 0.0,
        )


def _next_turns(trace: Trace) -> dict[int, int]:
    """Return for each request the number of the same session's next one."""
    following: dict[int, int] = {}
    latest: dict[str, int] = {}
    for number, request in enumerate(trace.requests):
        if request.session is not None:
            if request.session in latest:
                following[latest[request.session]] = number
            latest[request.session] = number
    return following
