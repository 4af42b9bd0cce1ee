"""A request over two workers: one prefills its prompt, another decodes from the KV cache that it is handed.

``HandOver`` stands between an exchange and its workers where any worker has a role, and nowhere else. It decides
whether the request goes over two workers, sees to the prefill leg of every attempt, and gives the exchange the route of
the other leg; the answer that the client gets is that of the decode worker, as it comes. Until its first byte
everything can be done again elsewhere.

With NIXL one leg follows the other. With Mooncake and SGLang they run at once: what fails takes the other with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from math import inf
from time import monotonic
from typing import Protocol
from uuid import uuid4

import numpy as np

from gateway.errors import NoWorker
from gateway.fleet.registry import Worker
from gateway.relay import legs
from gateway.relay.cached import CachedTokens
from gateway.relay.handovers import bootstrap_url
from gateway.relay.head import RequestHead, ResponseHead
from gateway.relay.prefill import PrefillLeg
from gateway.relay.retry import Failure, FailureKind
from gateway.relay.route import Plan, Route, count_leg, count_on, decide, dispatch, find_residency, leave_out
from gateway.relay.services import Services
from gateway.relay.upstream import Receiver
from policies.base import RoutingRequest
from policies.disaggregation import apart_cost_s, least_loaded, prospect, whole_cost_s


class Exchange(Protocol):
    """The exchange, as its hand-over sees it."""

    head: RequestHead
    body: bytes

    def abandon(self, failure: Failure) -> None:
        """Give up the attempt under way."""
        ...


class HandOver:
    """One request's way over two workers, or its whole way over one.

    Args:
        services: the other rooms.
        exchange: whose request it is.
        plan: the request's plan.
        received_at: when it came, monotonic seconds.
    """

    def __init__(self, services: Services, exchange: Exchange, plan: Plan, received_at: float) -> None:
        self._services = services
        self._exchange = exchange
        self._plan = plan
        self._received_at = received_at
        self._fields = legs.read_fields(exchange.body, keep_params=plan.body is not None)
        self._sequences = legs.sequences(exchange.head.path, exchange.body)
        self._whole: bool | None = None  # not decided yet
        self._tried: list[Worker] = []  # prefill workers that failed
        self._blameless: list[Worker] = []  # decode workers that waited for them
        self._refused = False  # a prefill worker finds the request wrong: another shall say so to the client
        self._leg: PrefillLeg | None = None
        self._decode_body = b""
        self._receiver: Receiver | None = None  # of the decode leg under way
        self._decoder: Worker | None = None
        self._awaits_token = False  # its head was there, and was no error
        self._completed = False
        self._sent_at = 0.0

    async def dispatch(self, tried: Collection[Worker]) -> Route:
        """Choose where the request goes next; where that is over two workers, its prefill leg is done or under way.

        Args:
            tried: workers that were to answer, and failed.

        Raises:
            GatewayError: the model is no longer served, or no worker is there.
        """
        self._receiver = self._decoder = None
        tried = [worker for worker in tried if worker not in self._blameless]
        if self._whole is None:
            self._whole = not await self._pays()
            self._services.hand_overs.decided("whole" if self._whole else "apart")
        if tried and (resort := await self._last_resort(tried)) is not None:
            return resort
        if not self._whole:
            leg = self._leg if self._leg is not None and self._is_fresh(self._leg) else await self._prefill()
            if leg is not None:
                return await self._decode(leg, tried)
            self._whole = True
        route = await dispatch(self._services, self._plan, tried)
        worker = route.worker
        if worker.config.pd == "sglang" and worker.config.role != "mixed" and not self._refused:
            route.end(monotonic())
            raise NoWorker(
                f"No prefill worker took the request, and without one {worker.name} cannot answer it.", retry_after_s=1
            )
        route.body = legs.write_fields(self._fields)
        return route

    def receiver(self, inner: Receiver) -> Receiver:
        """Return who is to be told about the answer of the worker that was dispatched to; it is asked right now.

        Args:
            inner: who else would be.
        """
        if self._decoder is None:
            return inner
        leg = self._leg
        assert leg is not None
        as_it_comes = leg.answer is not None and (leg.answer.cached_tokens is None or leg.answer.tells_cached_tokens)
        self._receiver = inner if as_it_comes else CachedTokens(inner, self._reported_tokens)
        self._awaits_token = False
        self._sent_at = monotonic()
        if leg.failure is not None:
            asyncio.get_running_loop().call_soon(self._lost, leg)
        return self

    def failed(self, failure: Failure) -> None:
        """The attempt has failed: nothing is left of its prefill leg, unless that can be of use to the next."""
        if self._leg is None or self._decoder is None:
            return
        if failure.kind is FailureKind.CONNECT and self._leg.answer is not None:
            return  # nobody has fetched its KV
        if failure.kind is FailureKind.PARTNER:
            self._blameless.append(self._decoder)
        self._drop("decode_failed")

    def close(self) -> None:
        """The request is over."""
        prefilled = self._leg is not None and self._leg.answer is not None
        self._drop("abandoned" if prefilled else "cancelled")
        self._receiver = None

    def begun(self, route: Route | None) -> None:
        """The client has its answer, or the next part of it: nothing is sent any more, and streams live long."""
        self._fields, self._decode_body = {}, b""
        if route is not None:
            route.body = None

    # Whether and where

    async def _pays(self) -> bool:
        """Return whether the request should go over two workers."""
        services, plan, config = self._services, self._plan, self._services.config.disaggregation
        assert plan.model is not None and plan.request is not None
        request = plan.request
        try:
            connector = services.registry.prefilling(plan.model).workers[0].config.pd
            if connector == "sglang":
                return self._sequences > 0
            if self._sequences != 1 or config.policy != "break-even":
                return self._sequences == 1 and config.policy == "always"
            prefills, held_there = await find_residency(services, plan.model, request, prefilling=True)
        except NoWorker:
            return False
        decodes, held_here = await find_residency(services, plan.model, request)
        now = monotonic()
        services.ledger.advance(now)
        there = prospect(prefills.fleet, held_there, request.prompt_tokens, now)
        here = prospect(decodes.fleet, held_here, request.prompt_tokens, now)
        source, target = prefills.workers[there.row], decodes.workers[here.row]
        rate = services.hand_overs.rates.bytes_per_s(source.name, target.name)
        transfer_s = config.latency_s + _kv_bytes(source, request) / rate
        return apart_cost_s(there, transfer_s) < whole_cost_s(here, config.interference)

    async def _prefill(self) -> PrefillLeg | None:
        """Begin a prefill leg, with NIXL see it through; None where no prefill worker takes the request."""
        retries = self._services.config.retries
        while len(self._tried) < retries.max_attempts:
            route = await self._prefill_route()
            if route is None:
                return None
            worker = route.worker
            body = await self._bodies(worker)
            if body is None:
                route.end(monotonic())
            else:
                self._leg = leg = PrefillLeg(self._services, self._exchange.head, self._plan, route, body)
                if worker.config.pd != "nixl":
                    leg.on_failure = self._lost
                    return leg
                await leg.task
                if leg.answer is not None and leg.answer.hands_over:
                    return leg
                self._leg, self._refused = None, leg.refused
                if leg.refused or leg.failure is None:
                    return None
            self._tried.append(worker)
            self._services.hand_overs.ended(worker, "", "prefill_failed")
            if not self._services.budget.spend(monotonic()):
                return None
        return None

    async def _last_resort(self, tried: Collection[Worker]) -> Route | None:
        """Where every worker that decodes has failed, let a prefill worker answer; SGLang's cannot."""
        assert self._plan.model is not None
        if any(worker not in tried for worker in self._services.registry.candidates(self._plan.model).workers):
            return None
        if any(worker.config.pd == "sglang" for worker in tried):
            return None
        self._drop("decode_failed")
        self._tried += [worker for worker in tried if worker.config.role == "prefill"]
        route = await self._prefill_route(answers=True)
        if route is not None:
            route.body = legs.write_fields(self._fields)
        return route

    async def _prefill_route(self, answers: bool = False) -> Route | None:
        """Choose a prefill worker, by what the model's policy says, and count the request there.

        Args:
            answers: it is to decode the request, too.

        Returns:
            None where no worker is left that has not failed.
        """
        services, plan = self._services, self._plan
        assert plan.model is not None and plan.request is not None and plan.policy is not None
        try:
            candidates, residency = await find_residency(services, plan.model, plan.request, prefilling=True)
        except NoWorker:
            return None
        workers, fleet, residency = leave_out(self._tried, candidates, residency)
        now = monotonic()
        services.ledger.advance(now)
        policy = services.policies.of_prefills(plan.policy)
        row = decide(services, policy, plan.request, fleet, residency, now).worker
        if workers[row] in self._tried:
            return None
        hit_tokens = min(residency.hit(row), plan.request.prompt_tokens)
        if answers:
            return count_on(services, plan, workers[row], hit_tokens, "last_resort", now)
        return count_leg(services, plan, workers[row], hit_tokens, now, decodes=False)

    async def _decode(self, leg: PrefillLeg, tried: Collection[Worker]) -> Route:
        """Choose a decode worker, by load and distance from the prefill worker, and count the request there."""
        services, plan = self._services, self._plan
        assert plan.model is not None and plan.request is not None
        candidates, residency = await find_residency(services, plan.model, plan.request)
        strange = [worker for worker in candidates.workers if worker.config.pd != leg.worker.config.pd]
        workers, fleet, _ = leave_out([*tried, *strange], candidates, residency)
        now = monotonic()
        services.ledger.advance(now)
        domain = leg.worker.config.domain
        near = np.array([float(worker.config.domain == domain) for worker in workers])
        self._decoder = workers[least_loaded(fleet, near, plan.request.prompt_tokens)]
        route = count_leg(services, plan, self._decoder, leg.hit_tokens, now, decodes=True)
        if leg.worker.config.pd == "nixl":
            assert leg.answer is not None
            self._decode_body = legs.nixl_decode(self._fields, leg.answer.params)
        route.body = self._decode_body
        return route

    async def _bodies(self, worker: Worker) -> bytes | None:
        """Return what the prefill worker gets, and keep what the decode worker will get where that is known already.

        None where the prefill worker does not say who it is.
        """
        if worker.config.pd == "nixl":
            return legs.nixl_prefill(self._fields)
        if worker.config.pd == "sglang":
            self._decode_body = legs.sglang_body(self._fields, worker, self._sequences)
            return self._decode_body
        engine_id = await self._services.hand_overs.engine_id(worker)
        if engine_id is None:
            return None
        transfer_id = f"xfer-{uuid4().hex}"
        body, self._decode_body = legs.mooncake_bodies(self._fields, transfer_id, engine_id, bootstrap_url(worker))
        return body

    # How a hand-over goes on

    def _is_fresh(self, leg: PrefillLeg) -> bool:
        """Return whether the prefill worker still holds the KV for us."""
        held_s = monotonic() - leg.ended_at if leg.ended_at else inf
        return leg.answer is not None and held_s < self._services.config.disaggregation.lease_s

    def _lost(self, leg: PrefillLeg) -> None:
        """A prefill leg has failed beside its decode leg, which waits for KV that will not come."""
        if leg is not self._leg or self._receiver is None or self._completed:
            return
        self._whole = self._refused = leg.refused
        self._tried.append(leg.worker)
        assert leg.failure is not None and self._decoder is not None
        self._services.hand_overs.ended(leg.worker, self._decoder.name, "prefill_failed")
        self._receiver = None
        self._exchange.abandon(
            Failure(FailureKind.PARTNER, f"waited for worker {leg.worker.name}, which {leg.failure.detail}")
        )

    def _drop(self, outcome: str) -> None:
        """Give the prefill leg up, if there is one; a hand-over that was completed is none any more."""
        leg, self._leg = self._leg, None
        if leg is None:
            return
        leg.cancel()
        if leg.failure is None and not self._completed:
            self._services.hand_overs.ended(leg.worker, self._decoder.name if self._decoder else "", outcome)

    def _complete(self) -> None:
        """The decode worker has begun to answer, and so has the KV."""
        self._completed = True
        leg, decoder, request = self._leg, self._decoder, self._plan.request
        assert leg is not None and decoder is not None and request is not None
        now, book = monotonic(), self._services.hand_overs
        book.ended(leg.worker, decoder.name, "completed")
        if self._plan.streamed:
            book.first_token(leg.worker, decoder, now - self._received_at)
            if leg.ended_at and leg.worker.config.pd != "sglang":  # whose prefill worker answers after the transfer
                seconds = now - max(leg.ended_at, self._sent_at)
                book.transferred(leg.worker, decoder, _kv_bytes(leg.worker, request), seconds)

    def _reported_tokens(self) -> int | None:
        """Return what the client is to be told was cached: what was so where the prompt was prefilled."""
        answer = self._leg.answer if self._leg is not None else None
        return answer.cached_tokens if answer is not None else None

    # The decode worker's answer

    def on_upstream_head(self, head: ResponseHead) -> None:
        """Its head; the 500 of an engine that could not load the KV is no answer."""
        if self._receiver is None:
            return
        if head.status == 500:
            self._receiver = None
            self._whole = self._leg is not None and self._leg.worker.config.pd != "sglang"
            self._exchange.abandon(Failure(FailureKind.BROKEN, "answered 500 to a request with handed-over KV"))
        else:
            self._awaits_token = head.status == 200
            self._receiver.on_upstream_head(head)

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of the body."""
        if self._receiver is not None:
            self._receiver.on_upstream_payload(payload)

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._receiver is None:
            return
        if self._awaits_token:
            self._awaits_token = False
            self._complete()
        self._receiver.on_upstream_data(data)

    def on_upstream_end(self) -> None:
        """It is complete."""
        if self._receiver is not None:
            self._receiver.on_upstream_end()

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        if self._receiver is not None:
            self._receiver.on_upstream_lost(failure)


def hand_over(services: Services, exchange: Exchange, plan: Plan, received_at: float) -> HandOver | None:
    """Return what takes a request over two workers; None where its prompt is not read."""
    return HandOver(services, exchange, plan, received_at) if plan.request is not None else None


def _kv_bytes(worker: Worker, request: RoutingRequest) -> float:
    return float(request.prompt_tokens * worker.config.tiers.kv_bytes_per_token)
