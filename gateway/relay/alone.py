"""Which worker answers a request alone, in fleets where prefill and decode are apart."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic

from gateway.errors import NoWorker
from gateway.fleet.registry import Worker
from gateway.relay.plan import Plan
from gateway.relay.route import Route, count_on, decide, dispatch, find_residency, leave_out
from gateway.relay.services import Services


async def dispatch_alone(services: Services, plan: Plan, tried: Collection[Worker]) -> Route | None:
    """Choose a worker that answers a request without a partner, and count the request on it; None where none does.

    Args:
        services: the other rooms.
        plan: the request's plan, with its prompt.
        tried: workers that have failed; they are asked again only where there are no others.

    Raises:
        GatewayError: the model is no longer served, or no worker is there.
    """
    route = await dispatch(services, plan, tried)
    if route.worker.config.answers_alone:
        return route
    route.end(monotonic())
    assert plan.model is not None
    workers = services.registry.candidates(plan.model).workers
    out = [worker for worker in workers if not worker.config.answers_alone]
    if len(out) == len(workers):
        return None
    if any(worker not in tried and worker not in out for worker in workers):
        out += tried
    return await dispatch(services, plan, out)


async def dispatch_to_prefill_worker(
    services: Services, plan: Plan, decodes: Collection[Worker], failed: Collection[Worker]
) -> Route | None:
    """Where every worker that decodes has failed, let a prefill worker answer; SGLang's cannot.

    Args:
        services: the other rooms.
        plan: the request's plan, with its prompt.
        decodes: workers that were to decode, and failed.
        failed: prefill workers that have.

    Returns:
        None where another worker decodes, or no prefill worker is left.
    """
    assert plan.model is not None and plan.request is not None and plan.policy is not None
    if any(worker not in decodes for worker in services.registry.candidates(plan.model).workers):
        return None
    if any(worker.config.pd == "sglang" for worker in decodes):
        return None
    try:
        candidates, residency = await find_residency(services, plan.model, plan.request, prefilling=True)
    except NoWorker:
        return None
    workers, fleet, residency = leave_out(failed, candidates, residency)
    now = monotonic()
    services.ledger.advance(now)
    row = decide(services, plan.policy, plan.request, fleet, residency, now).worker
    if workers[row] in failed:
        return None
    hit_tokens = min(residency.hit(row), plan.request.prompt_tokens)
    return count_on(services, plan, workers[row], hit_tokens, "last_resort", now)
