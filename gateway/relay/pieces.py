"""A held request's way to its turn: a long prompt is computed in pieces before, each at a turn of its own.

A piece is a warm-up: a request of our own for one token over a prefix of the prompt. While it is under way the request
stays held, and so it does until the turn of the next one. Whatever becomes of a piece, the request itself goes on: what
no piece has computed, it has left to prefill.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from time import monotonic

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.pieces import LongPrompt, Pieces
from gateway.fleet.registry import State
from gateway.relay.cached import CachedTokens
from gateway.relay.head import RequestHead
from gateway.relay.plan import Plan
from gateway.relay.prefill import PrefillLeg
from gateway.relay.route import Route, prefill_s_on
from gateway.relay.services import Services
from gateway.relay.upstream import Receiver
from gateway.replication.warmup import WarmUp
from policies.base import RoutingRequest


def its_turn(services: Services, plan: Plan, route: Route, head: RequestHead) -> Awaitable[bool]:
    """Wait until a held request may go to its worker, having it computed in pieces before where it is long.

    Args:
        services: the other rooms.
        plan: the request's plan.
        route: where it is held.
        head: the request's head; its pieces go with the client's own API key.

    Returns:
        False where the worker has stopped being ready meanwhile: another has to be chosen.

    Raises:
        Saturated: too many are held for this worker.
    """
    dispatcher, request = services.dispatcher, plan.request
    assert dispatcher is not None and request is not None, "it is held"
    if services.pieces is None or plan.prompt is None or route.flight.fetch is not None:
        return dispatcher.turn(route.flight, request)
    return _Chain(services, dispatcher, services.pieces, plan, request, route, head).run(plan.prompt)


@dataclass(slots=True)
class _Chain:
    """The pieces of one prompt on one worker."""

    services: Services
    dispatcher: Dispatcher
    pieces: Pieces
    plan: Plan
    request: RoutingRequest
    route: Route
    head: RequestHead

    async def run(self, long: LongPrompt) -> bool:
        """See the pieces through, one after the other, and wait for the turn of what they leave."""
        worker, flight, begin = self.route.worker, self.route.flight, self.route.hit_tokens
        for end in self.pieces.ends(worker, long, begin):
            if not self.dispatcher.holds(worker, flight.streamed) or not self.pieces.have_room(
                worker, flight.prompt_tokens
            ):
                break
            if not await self.dispatcher.turn(flight, self.request, end - begin) or worker.row < 0:
                return False
            warm_up = self.pieces.request(long, end)
            going_on = warm_up is not None and await self._compute(warm_up, begin, end)
            if worker.state is not State.READY or worker.row < 0:
                return False
            if not going_on:
                break
            begin = end
        return await self.dispatcher.turn(flight, self.request)

    async def _compute(self, warm_up: WarmUp, begin: int, end: int) -> bool:
        """Send a piece, counted by itself while it is under way; return whether another one may follow it."""
        services, worker = self.services, self.route.worker
        seconds = prefill_s_on(services, worker, end - begin, begin)
        flight = services.ledger.dispatch(worker, end, end - begin, seconds, monotonic())
        self._shrink(end)
        piece = Route(worker, flight, hit_tokens=begin, reason="piece")
        leg = PrefillLeg(services, warm_up.head_like(self.head), self.plan, piece, warm_up.body, is_retried=False)
        await leg.done()
        if leg.answer is None:
            self.pieces.failed(worker, leg.refused, leg.status)
            if worker.row >= 0:
                self._shrink(begin)
            return False
        cached = leg.answer.cached_tokens
        self.route.computed_tokens += end - (begin if cached is None else min(cached, end))
        return self.pieces.completed(end - begin, cached, begin)

    def _shrink(self, computed_tokens: int) -> None:
        """The request has but what lies behind ``computed_tokens`` left to prefill."""
        flight = self.route.flight
        new = flight.prompt_tokens - computed_tokens
        flight.shrink(new, prefill_s_on(self.services, self.route.worker, new, computed_tokens))


def without_pieces(route: Route, inner: Receiver) -> Receiver:
    """Return what has the client told how much of its prompt was cached before pieces of it were sent.

    Args:
        route: how the request goes.
        inner: whom its answer is passed on to.
    """

    def before(found_tokens: int | None) -> int | None:
        if found_tokens is None:
            return None
        route.found_tokens = found_tokens
        return _before(route, found_tokens)

    return CachedTokens(inner, before)


def cached_before(services: Services, route: Route, cached_tokens: int | None) -> int | None:
    """Return how much of a prompt was cached before pieces of it were sent, None where its engine does not say.

    Args:
        services: the other rooms.
        route: how the request went.
        cached_tokens: what the client was told, which is the engine's word where the answer could not be rewritten.
    """
    found_tokens = cached_tokens if route.found_tokens is None else route.found_tokens
    if found_tokens is None or services.pieces is None:
        return None
    services.pieces.found(route.worker, route.hit_tokens, found_tokens)
    return _before(route, found_tokens)


def _before(route: Route, found_tokens: int) -> int:
    return max(0, found_tokens - route.computed_tokens)
