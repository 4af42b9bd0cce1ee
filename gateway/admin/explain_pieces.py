"""In how many pieces a prompt would be computed, or why as a whole."""

from __future__ import annotations

from typing import Any, Final

from gateway.fleet.registry import Worker
from gateway.relay.plan import Plan
from gateway.relay.services import Services
from policies.base import Decision
from policies.pieces import is_long

_SHORT: Final = "no more than two pieces of it are to be computed"


def explain_pieces(services: Services, plan: Plan, worker: Worker, decision: Decision) -> dict[str, Any]:
    """Say how a prompt would be computed where it goes, as things are now.

    Args:
        services: the gateway's rooms.
        plan: of the request.
        worker: where it goes.
        decision: why.

    Returns:
        ``pieces``, how many of them go before the request itself, and ``why_whole``, where there are none.
    """
    ends = _ends(services, plan, worker, decision)
    return {"pieces": 0, "why_whole": ends} if isinstance(ends, str) else {"pieces": len(ends), "why_whole": ""}


def _ends(services: Services, plan: Plan, worker: Worker, decision: Decision) -> list[int] | str:
    """Return how many leading tokens each piece covers, or why there are none."""
    pieces, dispatcher, config = services.pieces, services.dispatcher, services.config.dispatch
    assert plan.request is not None
    tokens = plan.request.prompt_tokens
    if pieces is None or dispatcher is None:
        return "dispatch.piece_tokens is 0" if config.order == "least-work" else f"dispatch.order is {config.order}"
    if plan.prompt is None:
        if not is_long(tokens, config.piece_tokens):
            return _SHORT
        return "some worker has a role" if services.registry.apart else "its token ids are not known exactly"
    if obstacle := pieces.obstacle(worker, plan.prompt):
        return obstacle
    if decision.pull is not None:
        return "a prefix of it is fetched from another worker"
    if not dispatcher.holds(worker, plan.streamed):
        return "its answer is not streamed, and how fast the worker is is not known yet"
    if not pieces.have_room(worker, tokens):
        return "the worker's cache has no room to keep them, or its size is not known"
    return pieces.ends(worker, plan.prompt, decision.expected_hit_tokens) or _SHORT


def line_of(explained: dict[str, Any]) -> str:
    """Return what ``explain_pieces`` returned in one line."""
    if explained["pieces"]:
        return f"computed in {explained['pieces']} pieces and the request itself"
    return f"computed as a whole: {explained['why_whole']}"
