"""A whole fleet with its gateways, simulated from event to event.

``simulate`` is the entry point. Events lie in one heap, ordered by time and then by when they were made, so that equal
seeds give equal runs. Workers report when their present run of steps ends (``sim.batch``); whatever reaches one before
that cuts the run short. Policies are those of ``policies``, called as the gateway calls them (``sim.router``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from policies.base import Tier
from sim.batch import BatchWorker
from sim.cache import BlockChain
from sim.disaggregation import Disaggregation, Prefill
from sim.fleet import Failure, FleetSettings
from sim.gateways import Gateways
from sim.holding import Holding, Leg, Live
from sim.jobs import BatchLimits, Job
from sim.pieces import BETWEEN_S, Pieces
from sim.pull import Pulls
from sim.records import Records
from sim.replication import Replication
from sim.requests import Trace, named_tokens, next_turns
from sim.results import SimResult
from sim.router import Dispatch, Router, make_policy
from sim.sampling import Samples, totals
from sim.tiers import make_stacks

Progress = Callable[[int, int], None]
"""Called now and then with the requests answered so far, and all of them."""

PROGRESS_STEPS = 200
LOOK_S = 0.5  # between looks at those that wait for room


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
    fleet.check(trace)
    gc.freeze()  # traces are large, and looking through them for garbage again and again takes a sixth of the time
    try:
        return Simulation(trace, fleet, policy_name, policy_params, seed, on_progress).run()
    finally:
        gc.unfreeze()


class Simulation:
    """One run; see ``simulate``."""

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
        self.now = 0.0
        self.records = Records(trace)
        size = trace.block_tokens
        limits = BatchLimits(
            fleet.capacity_tokens // size + 1, size, fleet.block_tokens, fleet.max_batched_tokens, fleet.max_running
        )
        self.workers = [BatchWorker(limits, fleet.speed, tiers, fleet.eviction) for tiers in make_stacks(fleet, size)]
        self._lives = [0] * fleet.workers
        policies = [make_policy(policy_name, policy_params, seed + number) for number in range(fleet.gateway.replicas)]
        self.gateways = Gateways(policies, fleet, size, self._lives, self._at)
        self.routers = self.gateways.routers
        self._policy_name = policy_name
        self._on_progress = on_progress
        self._up = list(range(fleet.workers))
        self._down_until = [0.0] * fleet.workers
        self._live: dict[int, Live] = {}
        self._held: list[int] = []  # requests that came while no worker was up
        self._retries = self._lost = 0
        self._next_of: dict[int, int] = next_turns(trace) if trace.closed_loop else {}
        holds = fleet.gateway.order != "none"
        fleets = [router.fleet for router in self.routers]
        self._holding: Holding | None = Holding(fleet.gateway, fleets, size) if holds else None
        self._looking = False  # for room
        self._pieces = Pieces(trace, self.routers)
        self._apart = Disaggregation(fleet.disaggregation, fleet, size) if fleet.disaggregation else None
        self._replication = Replication(fleet.replication, fleet, size) if fleet.replication else None
        self._pulls = Pulls(fleet.pull, fleet, size) if fleet.pull else None
        self._samples = Samples(fleet.workers, fleet.sample_s)
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()

    def run(self) -> SimResult:
        """Let everything happen; requests that no worker is left for stay unanswered."""
        followers = set(self._next_of.values())
        for number, request in enumerate(self.trace.requests):
            if number not in followers:
                self._at(request.arrival_s, self._arrive, number)
        for failure in self.settings.failures:
            self._at(failure.at_s, self._fail, failure)
        if self._replication is not None:
            self._at(self._replication.settings.interval_s, self._replicate)
        heap = self._heap
        while heap and not self.records.complete:
            at, _, action, argument = heappop(heap)
            if at >= self._samples.due_at or at >= self.gateways.scrape_at:
                self._observe(at)
            self.now = at
            action(argument)
        return self.records.result(self._policy_name, self._samples.arrays(), self._counters())

    def _at(self, when: float, action: Callable[[Any], None], argument: Any = None) -> None:
        heappush(self._heap, (when, next(self._numbers), action, argument))

    # A request's way

    def _arrive(self, number: int) -> None:
        request, gateway = self.trace.requests[number], self.settings.gateway
        self.records.arrival_s[number] = self.now
        if self._replication is not None:
            self._replication.count(request, self.trace.block_tokens)
        delay = gateway.overhead_s + gateway.tokenize_s_per_token * request.prompt_tokens
        if delay:
            self._at(self.now + delay, self._route, number)
        else:
            self._route(number)

    def _route(self, number: int) -> None:
        if not self._up:
            self._held.append(number)
            return
        request, replica = self.trace.requests[number], number % len(self.routers)
        router, workers = self.routers[replica], self._up
        leg: Leg = "whole"
        there: Prefill | None = None
        if self._apart is not None:
            prefill, decode = self._apart.pools(workers)
            workers = decode or prefill
            there = self._apart.prefill_worker(request, router, prefill, decode, self.now)
        if there is None:
            dispatch = router.route(request, workers, self.now)
        else:
            turn, leg = there.turn, "prefill"
            dispatch = router.prefill(request, there.worker, self.now, turn.tokens if turn is not None else 0)
            if turn is not None:
                dispatch.source, dispatch.source_tokens = turn.worker, turn.tokens
        self.records.decided(number, dispatch.expected_hit_tokens)
        live = self._count(number, replica, dispatch, leg)
        if self._holding is None or self._holding.admits(live, request, self.now):
            self._deliver(live)
        else:
            self._look_soon()

    def _count(self, number: int, replica: int, dispatch: Dispatch, leg: Leg) -> Live:
        request = self.trace.requests[number]
        job = Job(
            number,
            BlockChain(request.chunks),
            request.prompt_tokens,
            1 if leg == "prefill" else request.output_tokens,
            named_tokens(request, self.trace.block_tokens),
            received=leg == "decode",
            pin_s=self.settings.eviction.tool_ttl_s if request.tool_call else 0.0,
            arrived_at=float(self.records.arrival_s[number]),
        )
        live = self._live[number] = Live(job, replica, dispatch, leg, self._lives[dispatch.worker])
        self._tell_others(replica, lambda router: router.hear_dispatch(number, dispatch.flight, self.now))
        return live

    def _deliver(self, live: Live) -> None:
        """The request reaches its worker, which may have died while the prompt's KV was on its way."""
        row = live.dispatch.worker
        if live.life != self._lives[row]:
            self._leave(live)
            self._route(live.job.number)
            return
        if live.dispatch.source is not None and self._fetch(live, live.dispatch.source):
            return
        if live.ends:
            job = self._pieces.begin(live, self.now)
        else:
            job = live.job
            self.routers[live.replica].started(live.dispatch, self.now)
        worker = self.workers[row]
        worker.add(job, self.now)
        ends_at = worker.ends_at
        if ends_at == inf:
            self._start(row)
            return
        worker.cut(self.now)
        if worker.ends_at != ends_at:
            self._at(worker.ends_at, self._run_ended, row)

    def _fetch(self, live: Live, source: int) -> bool:
        """Fetch the prefix that a request is to find on its worker; False where its source has no more of it."""
        live.dispatch.source = None
        row, hashes = live.dispatch.worker, self.trace.requests[live.job.number].chunks
        whole = hashes[: (live.dispatch.source_tokens or live.job.prompt_tokens) // self.trace.block_tokens]
        if live.leg == "prefill":
            assert self._apart is not None
            prefix, arrives_at = self._apart.pull(self.workers, source, row, whole, self.now)
        else:
            assert self._pulls is not None
            prefix, arrives_at = self._pulls.fetch(self.workers, source, row, whole, self.now)
        if arrives_at == self.now:
            return False
        self._at(arrives_at, self._fetched, (live, source, self._lives[source], prefix))
        return True

    def _fetched(self, fetch: tuple[Live, int, int, Sequence[int]]) -> None:
        """The prefix is there, if its source has lived to give it; the request joins the queue."""
        live, source, life, prefix = fetch
        row = live.dispatch.worker
        if life == self._lives[source]:
            self._insert((row, live.life, prefix))
        self._deliver(live)

    def _start(self, row: int) -> None:
        worker = self.workers[row]
        if worker.start(self.now):
            self._at(worker.ends_at, self._run_ended, row)
        elif (wake_at := worker.wake_at()) < inf:
            self._at(wake_at, self._wake, row)
        self._publish(row)

    def _wake(self, row: int) -> None:
        if self.workers[row].ends_at == inf:
            self._start(row)

    def _run_ended(self, row: int) -> None:
        worker = self.workers[row]
        if worker.ends_at != self.now:  # it was cut short and has ended already, or its worker has died
            return
        first, done = worker.finish(self.now)
        for job in first:
            if job.number not in self._pieces:
                self._answer(self._live[job.number])
        for job in done:
            if job.number in self._pieces:
                self._go_on_in_pieces(self._pieces.end(job.number, self.now))
            else:
                self._end(self._live[job.number])
        self._start(row)

    def _answer(self, live: Live) -> None:
        job = live.job
        self._release(live)
        self.routers[live.replica].first_byte(live.dispatch, self.now)
        self._tell_others(live.replica, lambda router: router.hear_first_byte(job.number, self.now))
        if live.leg != "decode":
            self.records.admitted(job.number, *live.begun())
        if live.leg != "prefill":
            self.records.answered(job.number, self.now)

    def _end(self, live: Live) -> None:
        self._leave(live)
        if live.leg == "prefill":
            self._hand_over(live)
            return
        if self._apart is not None and live.leg == "decode":
            self._apart.keep(self.trace.requests[live.job.number], live.dispatch.worker, self.now)
        self.records.finished(live.job.number, live.dispatch.worker, self.now)
        self._go_on(live.job.number)

    def _leave(self, live: Live) -> None:
        """The request is no longer on its worker."""
        number = live.job.number
        del self._live[number]
        self._release(live)
        self.routers[live.replica].end(live.dispatch, self.now)
        self._tell_others(live.replica, lambda router: router.hear_end(number, self.now))
        if self._holding is not None:
            self._let_go(self._holding.ended(live, self.now))

    def _release(self, live: Live) -> None:
        """Let go what was held behind a request."""
        if self._holding is not None:
            self._let_go(self._holding.left(live, self.now))

    def _let_go(self, held: Iterable[Live]) -> None:
        for following in held:
            self._at(self.now, self._deliver, following)

    def _go_on_in_pieces(self, live: Live) -> None:
        """A piece of a request is computed: what follows it waits for its turn."""
        assert self._holding is not None
        for following in self._holding.next_piece(live, self.trace.requests[live.job.number], self.now):
            self._at(self.now + BETWEEN_S * (following is live), self._deliver, following)
        self._look_soon()

    def _go_on(self, number: int) -> None:
        """A request is over: the conversation goes on."""
        done, total = self.records.done, len(self.trace.requests)
        if self._on_progress is not None and (done % max(1, total // PROGRESS_STEPS) == 0 or done == total):
            self._on_progress(done, total)
        following = self._next_of.get(number)
        if following is not None:
            self._at(self.now + self.trace.requests[following].think_s, self._arrive, following)

    def _hand_over(self, live: Live) -> None:
        """A prompt is computed: its KV goes to a decode worker, and the request after it."""
        assert self._apart is not None
        job, request = live.job, self.trace.requests[live.job.number]
        _, decode = self._apart.pools(self._up)
        if not decode or self._apart.link.down_until > self.now:
            self._at(self.now, self._route, job.number)  # not at once: its own worker is about to start its next steps
            return
        router = self.routers[live.replica]
        dispatch = router.decode(request, self._apart.decode_worker(request, router, decode, self.now), self.now)
        _, held = self.workers[dispatch.worker].lookup(job.chain, job.prompt_tokens)
        arrives_at = self._apart.arrives_at(job.prompt_tokens - held, job.first_at - job.started_at, self.now)
        self._at(arrives_at, self._deliver, self._count(job.number, live.replica, dispatch, "decode"))

    def _look_for_room(self, _: None) -> None:
        """Those that wait for room may have waited for long enough, or their worker be at rest."""
        assert self._holding is not None
        self._looking = False
        self._let_go(self._holding.look(self.now))
        self._look_soon()

    def _look_soon(self) -> None:
        """While somebody waits, look for room every now and then."""
        assert self._holding is not None
        if self._holding.makes_room and not self._looking and self._holding.waiting:
            self._looking = True
            self._at((self.now // LOOK_S + 1) * LOOK_S, self._look_for_room)

    # What is heard and seen of it

    def _tell_others(self, replica: int, news: Callable[[Router], None]) -> None:
        self.gateways.tell_others(replica, news, self.now)

    def _publish(self, row: int) -> None:
        if changes := self.workers[row].take_changes():
            self.gateways.publish(row, changes, self.now)

    def _observe(self, until: float) -> None:
        """Take the samples and scrapes that are due before ``until``; nothing has changed since the last event."""
        self._samples.check(until)
        while self._samples.due_at <= until:
            self._samples.take(self.workers, self.routers)
        self.gateways.scrape(self.workers, until)

    # What breaks, and what is done against it

    def _fail(self, failure: Failure) -> None:
        if failure.worker is None:
            self._lose_link(failure.link, self.now + failure.down_s)
            return
        row, until = failure.worker, self.now + failure.down_s
        if row in self._up:
            self._die(row, failure.cold)
        self._down_until[row] = max(self._down_until[row], until)
        if until < inf:
            self._at(until, self._return, row)

    def _lose_link(self, name: str, until: float) -> None:
        if self._apart is not None and name == "transfer":
            self._apart.link.fail(until)
        for worker in self.workers:
            if worker.tiers is not None:
                worker.tiers.lose_link(name, until)

    def _die(self, row: int, cold: bool) -> None:
        """A worker is gone with its caches; what it had not begun to answer goes elsewhere."""
        self._publish(row)
        self._up = [worker for worker in self._up if worker != row]
        self._lives[row] += 1
        worker, tiers = self.workers[row], [Tier.HBM, Tier.HOST]
        if cold:
            tiers.append(Tier.DISK)
        lives = self._holding.give_up(row) if self._holding is not None else []
        for job in worker.abandon():
            in_pieces = job.number in self._pieces
            lives.append(self._pieces.lose(job.number, self.now) if in_pieces else self._live[job.number])
        for live in lives:
            self._leave(live)
        if worker.tiers is not None:
            worker.tiers.lose(tiers)
        self.gateways.lost(row, tiers)
        for live in lives:
            number = live.job.number
            if live.job.first_at < 0:
                self._retries += 1
                self._route(number)
            else:
                self._lost += 1
                self.records.lost(number)
                self._go_on(number)

    def _return(self, row: int) -> None:
        if self.now < self._down_until[row]:  # it has failed again meanwhile
            return
        self._up = sorted({*self._up, row})
        held, self._held = self._held, []
        for number in held:
            self._route(number)

    def _replicate(self, _: None) -> None:
        assert self._replication is not None
        loads = {
            row: sum(float(router.fleet.pending_prefill_tokens[row]) for router in self.routers) for row in self._up
        }
        for row, prefix in self._replication.copies(self.gateways.index, loads):
            arrives_at = self._replication.arrives_at(prefix, self.now)
            self._at(arrives_at, self._insert, (row, self._lives[row], prefix))
        if self._heap:  # otherwise nothing will ever happen again
            self._at(self.now + self._replication.settings.interval_s, self._replicate)

    def _insert(self, copy: tuple[int, int, Sequence[int]]) -> None:
        row, life, prefix = copy
        if life == self._lives[row]:
            self.workers[row].insert(prefix)
            self._publish(row)

    def _counters(self) -> dict[str, float]:
        counters = totals(self.workers) | {"retries": float(self._retries), "lost": float(self._lost)}
        for part in (self._apart, self._replication, self._pulls):
            if part is not None:
                counters |= part.counters()
        return counters
