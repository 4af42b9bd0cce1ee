"""A gateway as the simulation has it: a policy, its view of the fleet, and what it knows of the caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from policies.base import FleetView, Policy, Residency, RoutingRequest, Tier, create_policy, known_policies
from policies.disaggregation import Fetch, Prospects, Weights, prospects
from sim.batch import BatchWorker
from sim.fleet import FleetSettings
from sim.index import ApproximateCaches, FleetIndex, Sent, Speculations
from sim.ledger import Flight, Ledger
from sim.pull import make_links
from sim.requests import SimRequest

MODEL = "sim"


class ChunkNames(Sequence[bytes]):
    """Chunk ids as a policy sees them; few of a prompt's are ever looked at."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> ChunkNames: ...

    def __getitem__(self, at: int | slice) -> bytes | ChunkNames:
        return ChunkNames(self._ids[at]) if isinstance(at, slice) else self._ids[at].to_bytes(8, "little")


def make_policy(name: str, params: Mapping[str, Any] | None, seed: int) -> Policy:
    """Build a policy; one that draws lots is seeded unless its parameters say how.

    Raises:
        PolicyError: no such policy, or parameters that it does not accept.
    """
    params = dict(params or {})
    policy = known_policies().get(name)
    if policy is not None and "seed" in policy.Params.__struct_fields__:
        params.setdefault("seed", seed)
    return create_policy(name, params)


def make_view(settings: FleetSettings) -> FleetView:
    """Return the view of an idle fleet."""
    profile = settings.speed
    names = [f"worker-{number}" for number in range(settings.workers)]
    fleet = FleetView(names, version=1, pulls=make_links(settings))
    fleet.prefill_a_s[:] = profile.prefill_a_s
    fleet.prefill_b_s[:] = profile.prefill_b_s
    fleet.prefill_c_s[:] = profile.prefill_c_s
    fleet.kv_capacity_tokens[:] = settings.capacity_tokens
    columns = {Tier.HOST: "reload_host_s", Tier.DISK: "reload_disk_s", Tier.REMOTE: "reload_remote_s"}
    for tier in reversed(settings.tiers):  # of several tiers of one kind, the fastest
        size = profile.kv_bytes_per_token
        seconds = size * tier.compression / tier.read_bytes_per_s + size / tier.codec_bytes_per_s
        fleet.column(columns[tier.tier])[:] = seconds
    return fleet


@dataclass(slots=True, eq=False)
class Dispatch:
    """A request counted on a worker."""

    worker: int
    flight: Flight
    sent: Sent
    expected_hit_tokens: int
    tokens: int  # prompt and answer together
    source: int | None = None  # worker to fetch a prefix from
    source_tokens: int | None = None  # how much of it; None: what that worker has


class Router:
    """One gateway.

    Args:
        policy: its own.
        settings: of the fleet.
        index: what is known from events; with ``approximate`` its own.
        block_tokens: tokens per chunk id.
    """

    def __init__(self, policy: Policy, settings: FleetSettings, index: FleetIndex, block_tokens: int) -> None:
        self.policy = policy
        self.fleet = make_view(settings)
        self.ledger = Ledger(self.fleet)
        self.index = index
        self.speculations = Speculations(settings.gateway.speculation_s)
        self._profile = settings.speed
        self._holds = settings.gateway.order != "none"
        self._block_tokens = block_tokens
        self._approximate: ApproximateCaches | None = None
        if settings.gateway.approximate:
            self._approximate = ApproximateCaches(index, settings.capacity_tokens, block_tokens)
        self._everyone = tuple(range(settings.workers))
        self._versions: dict[tuple[int, ...], int] = {}
        self._mirrored: dict[int, Flight] = {}

    def route(self, request: SimRequest, workers: Sequence[int], now: float) -> Dispatch:
        """Let the policy choose among ``workers``, and count the request where it goes."""
        residency = self.residency(request, workers, now)
        decision = self.policy.decide(self.asked(request), self.view(workers), residency, now)
        hit, pull = residency.hit(decision.worker), decision.pull
        if pull is None:
            return self._dispatch(request, workers[decision.worker], hit, decision.expected_hit_tokens, now)
        dispatch = self._dispatch(
            request, workers[decision.worker], hit + pull.tokens, decision.expected_hit_tokens, now
        )
        dispatch.source = workers[pull.source]
        return dispatch

    def prefill(self, request: SimRequest, worker: int, now: float, pulled_tokens: int = 0) -> Dispatch:
        """Count a request on the worker that computes its prompt for another, or pulls some of it."""
        hit = max(self.residency(request, [worker], now).hit(0), pulled_tokens)
        return self._dispatch(request, worker, hit, hit, now)

    def decode(self, request: SimRequest, worker: int, now: float) -> Dispatch:
        """Count a request whose prompt was computed elsewhere on the worker that decodes it."""
        flight = self.ledger.dispatch(worker, request.prompt_tokens, 1, 0.0, now)
        sent = self.speculations.add(worker, self._chunks(request))
        return Dispatch(worker, flight, sent, 0, request.prompt_tokens + request.output_tokens)

    def asked(self, request: SimRequest) -> RoutingRequest:
        """Return a request as policies see it."""
        chunks = ChunkNames(self._chunks(request))
        return RoutingRequest(
            MODEL,
            request.prompt_tokens,
            chunks,
            self._block_tokens,
            session=request.session,
            priority=request.priority,
        )

    def residency(self, request: SimRequest, workers: Sequence[int], now: float) -> Residency:
        """Return what each of ``workers`` is believed to hold of a prompt."""
        self.speculations.advance(now)
        return self.index.residency(self._chunks(request), self._block_tokens, workers, self.speculations)

    def prospects(
        self, request: SimRequest, workers: Sequence[int], now: float, weights: Weights, fetch: Fetch | None = None
    ) -> Prospects:
        """Return what a prompt would meet on each of ``workers``, which may ``fetch`` some of it."""
        residency = self.residency(request, workers, now)
        return prospects(self.view(workers), residency, request.prompt_tokens, now, weights, fetch)

    def view(self, workers: Sequence[int]) -> FleetView:
        """Return the state of ``workers``."""
        rows = tuple(workers)
        if rows == self._everyone:
            return self.fleet
        version = self._versions.setdefault(rows, -1 - len(self._versions))
        return self.fleet.take(np.array(rows), version)

    def piece(self, whole: Dispatch, prefix_tokens: int, now: float) -> Flight:
        """Count a piece of a held request, up to the end of a prefix, by itself, and the request for what is left."""
        flight, speed = whole.flight, self._profile
        begin, left = flight.prompt_tokens - flight.uncached_tokens, flight.prompt_tokens - prefix_tokens
        new = prefix_tokens - begin
        piece = self.ledger.dispatch(flight.row, prefix_tokens, new, speed.ttft_s(new, begin), now)
        self.ledger.shrink(flight, left, speed.ttft_s(left, prefix_tokens))
        return piece

    def started(self, dispatch: Dispatch, now: float) -> None:
        """A request that was held goes to its worker."""
        self.ledger.start(dispatch.flight, now)

    def first_byte(self, dispatch: Dispatch, now: float) -> None:
        """The worker answers."""
        self.ledger.first_byte(dispatch.flight, now)
        if self._approximate is None:
            self.speculations.settle(dispatch.sent, now)
        else:
            self.speculations.run(dispatch.sent)
            self._approximate.answered(dispatch.worker, self.speculations.running(dispatch.worker))

    def end(self, dispatch: Dispatch, now: float) -> None:
        """The request is no longer on its worker."""
        if self._approximate is not None and dispatch.flight.decoding:
            running = self.speculations.running(dispatch.worker)
            self._approximate.ended(dispatch.worker, dispatch.sent.chunks, dispatch.tokens, running)
        if self._approximate is not None or not dispatch.flight.decoding:
            self.speculations.forget(dispatch.sent)
        self.ledger.end(dispatch.flight, now)

    def scrape(self, workers: Sequence[BatchWorker]) -> None:
        """Read the engines' own numbers."""
        for row, worker in enumerate(workers):
            self.fleet.engine_running[row] = len(worker.running)
            self.fleet.engine_waiting[row] = len(worker.waiting)
            self.fleet.kv_usage[row] = worker.cache.usage

    def lost(self, worker: int) -> None:
        """A worker has died, and its cache with it."""
        self.speculations.forget_worker(worker)
        if self._approximate is not None:
            self._approximate.clear(worker)
            self.index.clear(worker)

    def hear_dispatch(self, number: int, flight: Flight, now: float) -> None:
        """Another gateway has sent request ``number`` to a worker."""
        self._mirrored[number] = self.ledger.dispatch(
            flight.row, flight.prompt_tokens, flight.uncached_tokens, flight.prefill_s, now
        )

    def hear_first_byte(self, number: int, now: float) -> None:
        """The request that another gateway has sent is being answered."""
        self.ledger.first_byte(self._mirrored[number], now)

    def hear_end(self, number: int, now: float) -> None:
        """The request that another gateway has sent is over."""
        self.ledger.end(self._mirrored.pop(number), now)

    def _chunks(self, request: SimRequest) -> Sequence[int]:
        return request.chunks[: request.prompt_tokens // self._block_tokens]

    def _dispatch(self, request: SimRequest, worker: int, hit: int, expected: int, now: float) -> Dispatch:
        """Count a request on the worker that computes its prompt."""
        prompt = request.prompt_tokens
        hit = min(hit, prompt)
        new = max(1, prompt - hit)
        flight = self.ledger.dispatch(worker, prompt, new, self._profile.ttft_s(new, hit), now, self._holds)
        sent = self.speculations.add(worker, self._chunks(request))
        return Dispatch(worker, flight, sent, expected, prompt + request.output_tokens)
