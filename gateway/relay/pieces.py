"""A held request's way to its turn: a long prompt is computed in pieces before, each at a turn of its own.

A piece is a warm-up: a request of our own for one token over a prefix of the prompt. While it is under way the request
stays held, and so it does until the turn of the next one. Whatever becomes of a piece, the request itself goes on: what
no piece has computed, it has left to prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import monotonic

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.pieces import LongPrompt, Pieces
from gateway.fleet.registry import State
from gateway.relay.prefill import PrefillLeg
from gateway.relay.route import Plan, Route, prefill_s_on
from gateway.relay.services import Services
from gateway.replication.warmup import WarmUp
from policies.base import RoutingRequest


def its_turn(services: Services, plan: Plan, route: Route) -> Awaitable[bool]:
    """Wait until a held request may go to its worker; see ``Dispatcher.turn``."""
    dispatcher, pieces, request = services.dispatcher, services.pieces, plan.request
    assert dispatcher is not None and request is not None, "it is held"
    if pieces is None or plan.prompt is None or route.flight.fetch is not None:
        return dispatcher.turn(route.flight, request)
    return _in_pieces(services, dispatcher, pieces, plan, plan.prompt, request, route)


async def _in_pieces(
    services: Services,
    dispatcher: Dispatcher,
    pieces: Pieces,
    plan: Plan,
    long: LongPrompt,
    request: RoutingRequest,
    route: Route,
) -> bool:
    worker, flight, begin = route.worker, route.flight, route.hit_tokens
    for end in pieces.ends(worker, long, begin):
        if not dispatcher.holds(flight) or not pieces.have_room(worker, flight.prompt_tokens):
            break
        if not await dispatcher.turn(flight, request, end - begin):
            return False
        warm_up = pieces.request(long, end)
        if warm_up is None:
            break
        leg = await _compute(services, plan, route, warm_up, begin, end)
        if worker.state is not State.READY or worker.row < 0:
            return False
        if leg.answer is None:
            pieces.failed(worker, leg.refused)
            _left(services, route, begin)
            break
        cached = leg.answer.cached_tokens
        route.computed_tokens += end - (begin if cached is None else min(cached, end))
        if not pieces.completed(end - begin, cached, begin):
            break
        begin = end
    return await dispatcher.turn(flight, request)


async def _compute(services: Services, plan: Plan, route: Route, warm_up: WarmUp, begin: int, end: int) -> PrefillLeg:
    """Send a piece, which is counted by itself while it is under way, and see it through."""
    worker = route.worker
    seconds = prefill_s_on(services, worker, end - begin, begin)
    flight = services.ledger.dispatch(worker, end, end - begin, seconds, monotonic())
    _left(services, route, end)
    piece = Route(worker, flight, hit_tokens=begin, reason="piece")
    leg = PrefillLeg(services, warm_up.head_for(worker), plan, piece, warm_up.body, is_retried=False)
    try:
        await asyncio.shield(leg.task)
    except asyncio.CancelledError:
        leg.cancel()
        raise
    return leg


def _left(services: Services, route: Route, computed_tokens: int) -> None:
    """A held request has but the prompt behind ``computed_tokens`` left to prefill."""
    flight = route.flight
    new = flight.prompt_tokens - computed_tokens
    flight.shrink(new, prefill_s_on(services, route.worker, new, computed_tokens))


def cached_before(services: Services, route: Route, cached_tokens: int | None) -> int | None:
    """Return how much of a prompt was cached before pieces of it were sent, None where its engine does not say.

    Args:
        services: the other rooms.
        route: how the request went.
        cached_tokens: prompt tokens that the engine found in its cache when the request itself came.
    """
    if cached_tokens is None or services.pieces is None:
        return None
    return services.pieces.cached_before(route.worker, route.hit_tokens, route.computed_tokens, cached_tokens)
