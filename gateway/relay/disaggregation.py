"""A request over two workers: one prefills its prompt, another decodes from the KV cache that it is handed.

``HandOver`` stands between an exchange and its workers where any worker has a role, and nowhere else. It decides
whether the request goes over two workers, sees to the prefill leg of every attempt, and gives the exchange the route of
the other leg; the answer that the client gets is that of the decode worker, as it comes. Until its first byte
everything can be done again elsewhere.

With NIXL and LMCache one leg follows the other. With Mooncake and SGLang they run at once: what fails takes the other
with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from math import inf
from time import monotonic
from typing import Final, Protocol
from uuid import uuid4

from gateway.errors import BadRequest, NoWorker
from gateway.fleet.registry import State, Worker
from gateway.observe.record import RequestRecord
from gateway.relay import legs
from gateway.relay.alone import dispatch_alone, dispatch_to_prefill_worker
from gateway.relay.answer import Answer
from gateway.relay.cached import CachedTokens
from gateway.relay.decoding import DecodeAnswer
from gateway.relay.handovers import bootstrap_url
from gateway.relay.head import RequestHead
from gateway.relay.pairing import Chosen, Pairing, find_decoder, find_pairing, judge
from gateway.relay.plan import Plan
from gateway.relay.prefill import PrefillLeg
from gateway.relay.retry import Failure, FailureKind
from gateway.relay.route import Route, count_leg, dispatch
from gateway.relay.services import Services
from gateway.relay.turns import ParamsReader, Turn
from gateway.relay.upstream import Receiver

_NOT_BY_SGLANG: Final = (
    "The workers here prefill or decode only, which SGLang's can do for /v1/chat/completions and /v1/completions, with "
    f"n from 1 to {legs.MAX_SEQUENCES} and without echo, prompt_logprobs, best_of and beam search."
)
_LOOK_S: Final = 0.25  # how often a worker that is written to is looked at


class Exchange(Protocol):
    """The exchange, as its hand-over sees it."""

    head: RequestHead
    body: bytes
    answer: Answer

    def abandon(self, failure: Failure) -> None:
        """Give up the attempt under way."""
        ...


class HandOver:
    """One request's way over two workers, or its whole way over one.

    Args:
        services: the other rooms.
        exchange: whose request it is.
        plan: the request's plan.
        record: what is written down about it.
    """

    def __init__(self, services: Services, exchange: Exchange, plan: Plan, record: RequestRecord) -> None:
        self._services = services
        self._exchange = exchange
        self._plan = plan
        self._record = record
        self._fields = legs.read_fields(exchange.body, keep_params=plan.body is not None)
        self._sequences = legs.sequences(exchange.head.path, exchange.body)
        self._whole: bool | None = None  # not decided yet
        self._tried: list[Worker] = []  # prefill workers that failed
        self._blameless: list[Worker] = []  # decode workers that waited for them
        self._refused = False  # a prefill worker finds the request wrong: another shall say so to the client
        self._leg: PrefillLeg | None = None
        self._decode_body = b""
        self._answer: DecodeAnswer | None = None  # of the decode leg under way
        self._decoder: Worker | None = None
        self._moved_tokens = 0  # of the prompt, to the decode worker
        self._completed = False
        self._receives: Worker | None = None  # the decode worker that LMCache writes to
        self._written: asyncio.Future[None] | None = None  # and when it has
        self._sent_at = 0.0

    async def dispatch(self, tried: Collection[Worker]) -> Route:
        """Choose where the request goes next; where that is over two workers, its prefill leg is done or under way.

        Args:
            tried: workers that were to answer, and failed.

        Raises:
            GatewayError: the model is no longer served, or no worker is there.
        """
        self._answer = self._decoder = None
        self._completed = False
        tried = [worker for worker in tried if worker not in self._blameless]
        pairing: Pairing | None = None
        if self._whole is None:
            verdict = await judge(self._services, self._plan, self._sequences)
            self._whole, pairing = not verdict.apart, verdict.pairing
            self._services.hand_overs.decided("whole" if self._whole else "apart")
            self._record.routed_at = self._record.routed_at or monotonic()  # and not when the prompt is computed
        if tried and (resort := await self._last_resort(tried)) is not None:
            return resort
        if not self._whole:
            leg = self._leg if self._leg is not None and self._is_fresh(self._leg) else None
            leg = leg or await self._prefill(pairing, tried)
            if leg is not None and (decoding := await self._decode(leg, tried)) is not None:
                return decoding
            self._drop("decode_failed")
            self._whole = True
        route = await dispatch_alone(self._services, self._plan, tried)
        if route is None and not self._refused:
            if not self._sequences:
                raise BadRequest(_NOT_BY_SGLANG)
            raise NoWorker(
                "No prefill worker handed the request to a decode worker, which cannot answer it alone.",
                retry_after_s=1,
            )
        route = route or await dispatch(self._services, self._plan, tried)
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
        inner = inner if as_it_comes else CachedTokens(inner, self._reported_tokens)
        keeps = leg.worker.config.pd == "nixl" and self._services.hand_overs.turns.enabled
        self._answer = DecodeAnswer(inner, self, ParamsReader() if keeps else None)
        self._sent_at = monotonic()
        if leg.failure is not None:
            asyncio.get_running_loop().call_soon(self._lost, leg)
        return self._answer

    def failed(self, failure: Failure) -> None:
        """The attempt has failed: nothing is left of its prefill leg, unless that can be of use to the next."""
        if self._leg is None or self._decoder is None:
            return
        pushed = self._leg.worker.config.pd == "lmcache"
        if failure.kind is FailureKind.CONNECT and self._leg.answer is not None and not pushed:
            return  # nobody has fetched its KV
        if failure.kind is FailureKind.PARTNER:
            self._blameless.append(self._decoder)
        self._drop("decode_failed")

    def close(self) -> None:
        """The request is over."""
        prefilled = self._leg is not None and self._leg.answer is not None
        self._drop("abandoned" if prefilled else "cancelled")
        if self._answer is not None:
            self._answer.drop()

    def begun(self, route: Route | None) -> None:
        """The client has its answer, or the next part of it: nothing is sent any more, and streams live long."""
        self._fields, self._decode_body = {}, b""
        if route is not None:
            route.body = None

    # Whether and where

    async def _prefill(self, pairing: Pairing | None, tried: Collection[Worker]) -> PrefillLeg | None:
        """Begin a prefill leg, with NIXL see it through; None where no prefill worker takes the request.

        Args:
            pairing: of the pools as they are now; None: they are to be looked at.
            tried: decode workers that have failed.
        """
        services, plan = self._services, self._plan
        while len(self._tried) < services.config.retries.max_attempts:
            try:
                pairing = pairing or await find_pairing(services, plan)
            except NoWorker:
                return None
            chosen = pairing.choose(self._tried, tried)
            if chosen is None:
                return None
            worker = chosen.prefill
            turn = pairing.turn if worker.config.pd == "nixl" else None
            pairing = None
            route = count_leg(services, plan, worker, chosen.hit_tokens, monotonic(), decodes=False)
            body: bytes | None = None
            try:
                body = await self._bodies(chosen, turn)
            finally:
                if body is None:
                    route.end(monotonic())
            if body is not None:
                pulls = turn is not None
                self._leg = leg = PrefillLeg(services, self._exchange.head, plan, route, body, pulls=pulls)
                if worker.config.pd in legs.AT_ONCE:
                    await leg.goes()  # the decode worker would wait for a prefill that is held, and be blamed for it
                    if leg.failure is None:
                        leg.on_failure = self._lost
                        return leg
                elif await self._prefilled(leg, pulls):
                    return leg
                self._leg, self._refused = None, leg.refused
                if leg.refused:
                    return None
                if leg.failure is None:  # it has answered, but its KV cannot be had
                    services.hand_overs.ended(worker, "", "prefill_failed")
                    return None
                if pulls and leg.failure.kind is FailureKind.PARTNER:
                    continue  # what it was to pull is gone: the same worker can compute it
            services.hand_overs.ended(worker, "", "prefill_failed")
            self._tried.append(worker)
            if not services.budget.spend(monotonic()):
                return None
        return None

    async def _prefilled(self, leg: PrefillLeg, pulls: bool) -> bool:
        """Wait for a prefill leg that comes before the decode leg; return whether its KV can be had."""
        await leg.task
        if pulls:
            self._services.hand_overs.turns.outcomes["pulled" if leg.answer is not None else "failed"] += 1
        if leg.worker.config.pd == "nixl":
            return leg.answer is not None and leg.answer.hands_over
        assert self._written is not None
        if leg.answer is None:
            self._written.cancel()
            return False
        await self._wait_until_written(leg.worker, self._written)
        return not self._written.cancel()  # what is done cannot be cancelled

    async def _wait_until_written(self, worker: Worker, written: asyncio.Future[None]) -> None:
        """Wait for LMCache's notices, but not while the worker that is written to has left, or is taken to be dead."""
        receives = self._receives
        assert receives is not None
        until = monotonic() + self._services.config.disaggregation.lease_s
        while not written.done() and _is_ready(receives) and (left_s := until - monotonic()) > 0:
            await asyncio.wait([written], timeout=min(left_s, _LOOK_S))
        if not written.done() and _is_ready(receives):
            self._services.hand_overs.notices.missed(worker.name)

    async def _decode(self, leg: PrefillLeg, tried: Collection[Worker]) -> Route | None:
        """Choose a decode worker for what was or is being prefilled, and count the request; None where there is none.

        While the prompt was computed others have come and gone, so that the best partner may be another one by now.
        """
        services, plan = self._services, self._plan
        if leg.worker.config.pd == "lmcache":
            self._decoder = self._receives
        elif (found := await find_decoder(services, plan, leg.worker, tried)) is not None:
            self._decoder, self._moved_tokens = found
        if self._decoder is None:
            return None
        route = count_leg(services, plan, self._decoder, leg.hit_tokens, monotonic(), decodes=True)
        if leg.worker.config.pd == "nixl":
            assert leg.answer is not None
            self._decode_body = legs.nixl_decode(self._fields, leg.answer.params)
        route.body = self._decode_body
        return route

    async def _last_resort(self, tried: Collection[Worker]) -> Route | None:
        """Where every worker that decodes has failed, let a prefill worker answer."""
        self._tried += [worker for worker in tried if worker.config.role == "prefill" and worker not in self._tried]
        route = await dispatch_to_prefill_worker(self._services, self._plan, tried, self._tried)
        if route is not None:
            self._drop("decode_failed")
            route.body = legs.write_fields(self._fields)
        return route

    async def _bodies(self, chosen: Chosen, turn: Turn | None) -> bytes | None:
        """Return what the prefill worker gets, and keep what the decode worker will get where that is known already.

        None where the prefill worker does not say who it is.
        """
        worker, hand_overs = chosen.prefill, self._services.hand_overs
        if worker.config.pd == "nixl":
            if turn is None:
                return legs.nixl_prefill(self._fields)
            hand_overs.turns.take(turn)
            return legs.nixl_prefill(self._fields, turn.params)
        if worker.config.pd == "lmcache":
            self._receives, transfer_id = chosen.decode, f"xfer-{uuid4().hex}"
            self._written = hand_overs.notices.expect(transfer_id, len(chosen.decode.config.lmcache_init_ports))
            self._decode_body = legs.write_fields(self._fields)
            return legs.lmcache_prefill(self._fields, transfer_id, chosen.decode)
        if worker.config.pd == "sglang":
            self._decode_body = legs.sglang_body(self._fields, worker, self._sequences)
            return self._decode_body
        engine_id = await hand_overs.engine_id(worker)
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
        if leg is not self._leg or self._answer is None or self._completed:
            return
        self._answer.drop()
        self._answer = None
        self._whole = self._refused = leg.refused
        self._tried.append(leg.worker)
        assert leg.failure is not None and self._decoder is not None
        self._services.hand_overs.ended(leg.worker, self._decoder.name, "prefill_failed")
        self._exchange.abandon(
            Failure(FailureKind.PARTNER, f"waited for worker {leg.worker.name}, which {leg.failure.detail}")
        )

    def _drop(self, outcome: str) -> None:
        """Give the prefill leg up, if there is one; a hand-over that was completed is none any more."""
        leg, self._leg = self._leg, None
        if leg is None:
            return
        leg.cancel()
        if self._written is not None:
            self._written.cancel()
        if leg.failure is None and not self._completed:
            self._services.hand_overs.ended(leg.worker, self._decoder.name if self._decoder else "", outcome)

    # What the decode worker's answer shows

    def loaded(self) -> None:
        """The decode worker has begun to answer, and so the KV has arrived."""
        self._completed = True
        leg, decoder = self._leg, self._decoder
        assert leg is not None and decoder is not None
        now, book = monotonic(), self._services.hand_overs
        book.ended(leg.worker, decoder.name, "completed")
        if self._plan.streamed:
            book.first_token(leg.worker, decoder, now - self._record.received_at)
            if leg.ended_at and leg.worker.config.pd not in ("lmcache", "sglang"):  # which answer after the transfer
                seconds = now - max(leg.ended_at, self._sent_at)
                size = float(self._moved_tokens * leg.worker.config.tiers.kv_bytes_per_token)
                book.transferred(leg.worker, decoder, size, seconds)

    def not_loaded(self, detail: str) -> None:
        """The decode worker could not load the KV: the request is to go another way."""
        self._answer = None
        assert self._leg is not None and self._decoder is not None
        prefill = self._leg.worker
        self._whole = prefill.config.pd != "sglang"
        is_to_blame = self._services.hand_overs.lost(prefill, self._decoder)
        self._exchange.abandon(Failure(FailureKind.BROKEN if is_to_blame else FailureKind.NO_KV, detail))

    def ended(self, reader: ParamsReader) -> None:
        """Note where the decode worker keeps this turn, if it says so and has not left meanwhile."""
        params, usage = reader.params(), self._exchange.answer.usage
        if params is not None and usage is not None and self._decoder is not None and self._decoder.row >= 0:
            assert self._plan.request is not None
            turns = self._services.hand_overs.turns
            turns.keep(self._plan.request, usage.prompt_tokens, self._decoder, params, monotonic())

    def _reported_tokens(self, _cached_tokens: int | None) -> int | None:
        """Return what the client is to be told was cached: what was so where the prompt was prefilled."""
        answer = self._leg.answer if self._leg is not None else None
        return answer.cached_tokens if answer is not None else None


def _is_ready(worker: Worker) -> bool:
    return worker.state is State.READY and worker.row >= 0


def hand_over(services: Services, exchange: Exchange, plan: Plan, record: RequestRecord) -> HandOver | None:
    """Return what takes a request over two workers; None where its prompt is not read."""
    return HandOver(services, exchange, plan, record) if plan.request is not None else None
