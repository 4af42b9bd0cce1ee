"""The routing step: from a request's body to a worker, with the request counted there.

A plan is made once per request; every attempt dispatches by it, leaving out the workers that were tried. What cannot
be known (no tokens, no index, a policy that fails) makes the choice poorer, never the request fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from operator import index
from random import random
from time import monotonic
from typing import Final, get_args

import msgspec
import numpy as np

from gateway.config import RoutePath
from gateway.dispatch.pieces import LongPrompt
from gateway.errors import BadRequest, GatewayError, NoWorker
from gateway.fleet.ledger import Fetch, Flight
from gateway.fleet.registry import Candidates, State, Worker
from gateway.index.base import Speculation
from gateway.observe.record import RequestRecord
from gateway.relay.legs import without_hosts
from gateway.relay.naming import named_model, only_model
from gateway.relay.pull import SourceHint
from gateway.relay.retry import Failure, FailureKind, backoff_s
from gateway.relay.services import Services
from policies.base import COLUMNS, Decision, FleetView, Policy, Residency, RoutingRequest

PROMPT_PATHS: Final = frozenset(get_args(RoutePath))
"""Requests whose prompt is read and whose worker is chosen by what it has cached."""

_DEFAULT_OUTPUT_TOKENS: Final = 256
_CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
_PREFILL_A, _PREFILL_B, _PREFILL_C = (COLUMNS.index(f"prefill_{term}_s") for term in "abc")

_subset_versions = count(-1, -1)


class Plan(msgspec.Struct):
    """What is known of a request before a worker is chosen.

    Attributes:
        model: the name the client used, and some worker serves; None where the request names none.
        streamed: whether the answer comes token by token.
        request: what the policy sees; None for requests that go by load alone.
        body: what the worker gets in place of the client's body; None where it gets that.
        policy: decides about ``request``.
        prompt: what pieces of the prompt are made of, where it may go in pieces; forgotten once it is answered.
    """

    model: str | None = None
    streamed: bool = False
    request: RoutingRequest | None = None
    body: bytes | None = None
    policy: Policy | None = None
    prompt: LongPrompt | None = None

    def note(self, record: RequestRecord) -> None:
        """Write down what the request is."""
        record.stream = self.streamed
        if self.model is not None:
            record.model = self.model
        if self.request is not None:
            record.request = self.request
            record.prompt_tokens = self.request.prompt_tokens


class Route(msgspec.Struct):
    """A worker chosen, and the request counted on it.

    Attributes:
        worker: where the request goes.
        flight: its entry in the ledger.
        speculation: its prompt's entry in the index, where it has one.
        chunks: the prompt's chunks.
        to_remember: the worker has prefilled the prompt and publishes no events: see ``remember``.
        hit_tokens: prompt tokens the worker is believed to have cached.
        asks_report: the request is to ask its engine for a report of what it reuses.
        reason: the decision's reason.
        body: what this worker gets in place of the plan's body, where prefill and decode are apart.
        hint: whom its engine is told to fetch a prefix from, where it is to be told.
        computed_tokens: prompt tokens that pieces of it have computed there, before it went itself.
        found_tokens: where pieces have, what its engine reported as cached when it came; None unless it did.
    """

    worker: Worker
    flight: Flight
    speculation: Speculation | None = None
    chunks: Sequence[bytes] = ()
    to_remember: bool = False
    hit_tokens: int = 0
    reason: str = "load"
    asks_report: bool = False
    body: bytes | None = None
    hint: SourceHint | None = None
    computed_tokens: int = 0
    found_tokens: int | None = None

    def note(self, record: RequestRecord) -> None:
        """Write down where the request goes."""
        record.attempts += 1
        record.worker = self.worker.name
        record.reason = self.reason
        record.predicted_hit_tokens = self.hit_tokens

    def answered(self, status: int, now: float) -> None:
        """The first byte of the answer has arrived."""
        self.flight.first_byte(now)
        if self.speculation is None or status >= 400:
            return
        if self.worker.config.kv_events is None:
            self.to_remember = True
            self.speculation.answered()
        else:
            self.speculation.settle(now)
            self.speculation = None

    def end(self, now: float) -> None:
        """The request is no longer on its worker."""
        self.flight.end(now)
        if self.speculation is not None:
            self.speculation.cancel()
            self.speculation = None


async def make_plan(services: Services, method: bytes, path: str, body: bytes, counts: bool = True) -> Plan:
    """Read what routing needs from a request.

    Args:
        services: the other rooms.
        method: of the request.
        path: of the request.
        body: of the request.
        counts: whether it is a use of its prefix.

    Raises:
        GatewayError: the body is not a valid request, its model is not served, or no worker is there to serve it.
    """
    if path not in PROMPT_PATHS or method != b"POST":
        model = named_model(body) if body else None
        if model is not None:
            services.registry.candidates(model)  # raises for a model nobody serves
        moves_kv = services.registry.apart or services.registry.fleet.pulls is not None
        return Plan(model, body=without_hosts(body) if moves_kv and body else None)
    request = await services.prompts.read(path, body)
    model = request.model or only_model(services.registry)
    candidates = services.registry.candidates(model)
    config = services.config.prompt
    long: LongPrompt | None = None
    try:
        prompt = await services.prompts.prompt(request, candidates)
        tokens, chunks = prompt.tokens, prompt.chunks
        services.prompts.check(path, body, request, prompt, candidates)
        forwarded = services.prompts.body_with_ids(body, prompt, candidates)
        if counts and services.seen is not None:
            services.seen.note(model, path, body, request, prompt)
        if services.pieces is not None:
            long = services.pieces.read(model, request, prompt, candidates)
    except GatewayError:
        raise
    except Exception:
        services.complain("a prompt could not be prepared; its request goes by load")
        tokens, chunks, forwarded = int(len(body) / config.bytes_per_token), [], None
    routing_request = RoutingRequest(
        model=candidates.model,
        prompt_tokens=tokens,
        chunks=chunks,
        chunk_tokens=config.chunk_tokens,
        output_tokens=request.max_tokens or _DEFAULT_OUTPUT_TOKENS,
        session=request.session,
        priority=-(request.priority or 0),  # in requests, as engines have it, less is more urgent
    )
    policy = services.policies.of(model, candidates.model, path)
    return Plan(model, bool(request.stream), routing_request, forwarded, policy, long)


def prompt_path(path: str, body: bytes) -> str:
    """Return the path of a request that an operator asks about; an empty one is an OpenAI chat's or completion's.

    Raises:
        BadRequest: requests to it have no prompt.
    """
    path = path or ("/v1/chat/completions" if b'"messages"' in body else "/v1/completions")
    if path not in PROMPT_PATHS:
        raise BadRequest(f"Requests to {path} have no prompt; they go to the least loaded worker.")
    return path


def has_others(services: Services, plan: Plan, tried: Collection[Worker]) -> bool:
    """Return whether a worker that was not tried yet could take the request."""
    return any(worker not in tried for worker in _workers(services, plan.model))


def retry_delay_s(
    services: Services, plan: Plan, tried: Collection[Worker], failure: Failure, repeatable: bool
) -> float | None:
    """Return how long to wait before another attempt, None where there is to be none; it is paid for from the budget.

    Args:
        services: the other rooms.
        plan: the request's plan.
        tried: where it was sent.
        failure: what came of the last attempt.
        repeatable: whether the request may run twice.
    """
    config = services.config.retries
    if len(tried) >= config.max_attempts:
        return None
    if not repeatable and failure.kind is not FailureKind.CONNECT:
        return None
    delay_s = backoff_s(config, len(tried))
    if not has_others(services, plan, tried):
        if failure.retry_after_s > config.backoff_max_s:
            return None
        delay_s = max(delay_s, failure.retry_after_s)
    return delay_s if services.budget.spend(monotonic()) else None


async def dispatch(services: Services, plan: Plan, tried: Collection[Worker]) -> Route:
    """Choose a worker and count the request on it; one of ``tried`` only where there is no other.

    Raises:
        GatewayError: the model is no longer served, or no worker is there.
    """
    if plan.request is None:
        workers = _workers(services, plan.model)
        worker = _least_loaded(services, [worker for worker in workers if worker not in tried] or workers)
        return Route(worker, services.ledger.dispatch(worker, 0, 0, 0.0, monotonic(), streamed=False))
    assert plan.model is not None and plan.policy is not None
    candidates, residency = await find_residency(services, plan.model, plan.request)
    workers, fleet = candidates.workers, candidates.fleet
    if tried:
        workers, fleet, residency = leave_out(tried, candidates, residency)
    now = monotonic()
    services.ledger.advance(now)
    if fleet.pulls is not None:
        services.fetches.fade(now)
    decision = decide(services, plan.policy, plan.request, fleet, residency, now)
    worker, pull = workers[decision.worker], decision.pull
    if pull is None:
        hit_tokens = min(residency.hit(decision.worker), plan.request.prompt_tokens)
        route = count_on(services, plan, worker, hit_tokens, decision.reason, now)
    else:
        idle = not fleet.pending_prefill_s[decision.worker]
        fetch = Fetch(worker, pull.tokens, pull.seconds, decision.expected_hit_tokens, idle)
        route = count_on(services, plan, worker, fetch.hit_tokens, decision.reason, now, fetch)
    if fleet.pulls is not None and worker.config.pull.hint == "vllm-p2p":
        route.hint = SourceHint(workers[pull.source] if pull is not None else None, plan.body is not None)
    return route


def leave_out(
    tried: Collection[Worker], candidates: Candidates, residency: Residency
) -> tuple[list[Worker], FleetView, Residency]:
    """Return workers, view and residency of the candidates without those ``tried``, unless there are no others."""
    workers, fleet = candidates.workers, candidates.fleet
    if tried and (rows := [row for row, worker in enumerate(workers) if worker not in tried]):
        workers = [workers[row] for row in rows]
        fleet = fleet.take(np.array(rows), next(_subset_versions))
        residency = residency.take(np.array(rows))
    return workers, fleet, residency


async def remember(services: Services, route: Route, tokens: int) -> None:
    """Note what a worker without KV events has served. While it answered, the speculation said so.

    Args:
        services: the other rooms.
        route: how the request went.
        tokens: its prompt and answer together, as far as they are known.
    """
    worker = route.worker
    capacity_tokens = services.registry.fleet.state.item(_CAPACITY, worker.row) if worker.row >= 0 else 0.0
    chunk_tokens = services.config.prompt.chunk_tokens
    await services.approximate.sent(worker.slot, route.chunks, chunk_tokens, capacity_tokens, tokens)
    # Where another replica keeps the worker's model, this tells it, and says so here until it has it in the index.
    speculation, route.speculation = route.speculation, None
    if speculation is not None:
        speculation.settle(monotonic())


async def find_residency(
    services: Services, model: str, request: RoutingRequest, prefilling: bool = False
) -> tuple[Candidates, Residency]:
    """Return the candidates, with their load as it is now, and what each of them holds of the prompt.

    Args:
        services: the other rooms.
        model: what they serve.
        request: the prompt.
        prefilling: not the workers that decode, but those that prefill for them.

    Raises:
        GatewayError: there are none.
    """
    if services.approximate.is_crowded:
        await services.approximate.make_room()
    registry = services.registry
    select = registry.prefilling if prefilling else registry.candidates
    while True:
        candidates, version = select(model), registry.version
        if not request.chunks:
            return candidates, Residency.none(len(candidates.workers))
        residency = await services.index.residency(request.chunks, candidates.slots, request.chunk_tokens)
        if registry.version != version:
            continue
        if candidates.fleet is not registry.fleet:
            # A copy: a shared index took time to answer, and others were dispatched meanwhile.
            candidates = select(model)
        return candidates, residency


def decide(
    services: Services, policy: Policy, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float
) -> Decision:
    """Ask a policy; one that fails, or chooses none of the candidates, is answered for by load."""
    try:
        decision = policy.decide(request, fleet, residency, now)
        if not (0 <= index(decision.worker) < len(fleet.names) and isinstance(decision.reason, str)):
            raise ValueError(f"worker {decision.worker} of {len(fleet.names)}, reason {decision.reason!r}")
        return decision
    except Exception:
        services.complain("policy %r failed; requests go by load", policy.name)
        return Decision(int(np.argmin(fleet.running)), reason="policy_failed")


def count_on(
    services: Services,
    plan: Plan,
    worker: Worker,
    hit_tokens: int,
    reason: str,
    now: float,
    fetch: Fetch | None = None,
) -> Route:
    """Count a request on the worker that is to prefill its prompt, after what it is to fetch of it."""
    request = plan.request
    assert request is not None
    new = max(1, request.prompt_tokens - hit_tokens)
    prefill_s = prefill_s_on(services, worker, new, hit_tokens)
    held = services.dispatcher is not None
    if fetch is not None:
        fetch.rest_s = prefill_s
        prefill_s += fetch.seconds
    flight = services.ledger.dispatch(worker, request.prompt_tokens, new, prefill_s, now, plan.streamed, held)
    flight.fetch = fetch
    return _speculate(services, request, worker, flight, hit_tokens, reason, now)


def prefill_s_on(services: Services, worker: Worker, new: int, cached: int) -> float:
    """Return the seconds that a worker takes for so many new tokens behind cached ones.

    That is ``T_prefill(n, p) = a + b·n + c·n·(p + n/2)``, with the worker's learned a, b, c.
    """
    cell, row = services.registry.fleet.state.item, worker.row
    return cell(_PREFILL_A, row) + new * (cell(_PREFILL_B, row) + cell(_PREFILL_C, row) * (cached + new / 2))


def count_leg(services: Services, plan: Plan, worker: Worker, hit_tokens: int, now: float, decodes: bool) -> Route:
    """Count one leg of a request that goes over two workers, on the one that prefills it or on the one that decodes it.

    The prefill leg ends with the prefill, so its end is seen like a stream's first byte. The decode leg has nothing to
    prefill: what its first byte comes after is the transfer.
    """
    request = plan.request
    assert request is not None
    if decodes:
        flight = services.ledger.dispatch(worker, request.prompt_tokens, 0, 0.0, now, streamed=False)
        return _speculate(services, request, worker, flight, hit_tokens, "apart", now)
    leg = Plan(plan.model, True, request)
    return count_on(services, leg, worker, hit_tokens, "apart", now)


def _speculate(
    services: Services,
    request: RoutingRequest,
    worker: Worker,
    flight: Flight,
    hit_tokens: int,
    reason: str,
    now: float,
) -> Route:
    """Return the route of a request that was counted, with its prompt noted in the index."""
    speculation = None
    if request.chunks and worker.slot >= 0:
        speculation = services.index.speculate(worker.slot, request.chunks)
        if services.outbox is not None:
            speculation = services.outbox.announce(worker, request.chunks, speculation)
    route = Route(worker, flight, speculation, request.chunks, hit_tokens=hit_tokens, reason=reason)
    if worker.refill_until > now:
        route.asks_report = worker.is_vllm and random() < services.config.index.refill_share
    return route


def _workers(services: Services, model: str | None) -> list[Worker]:
    if model is not None:
        return services.registry.candidates(model).workers
    everyone = services.registry.workers.values()
    for state in (State.READY, State.EJECTED):
        if workers := [worker for worker in everyone if worker.state is state]:
            return workers
    raise NoWorker("No worker is ready.", retry_after_s=1)


def _least_loaded(services: Services, workers: list[Worker]) -> Worker:
    running = services.registry.running()
    return min(workers, key=lambda worker: running[worker.row] + random())  # a fraction: ties are broken by chance
