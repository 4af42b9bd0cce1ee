"""Why a request would go where it would go."""

from __future__ import annotations

import copy
from time import monotonic
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.errors import BadRequest
from gateway.relay.route import PROMPT_PATHS, find_residency, make_plan
from gateway.relay.services import Services
from policies.base import Tier


async def explain(services: Services, path: str, body: bytes) -> dict[str, Any]:
    """Decide about a request without sending or counting it.

    Args:
        services: the gateway's rooms.
        path: ``/v1/chat/completions`` or ``/v1/completions``; empty: found from the body.
        body: the request's body.

    Returns:
        ``policy``, ``model``, ``prompt_tokens``, ``chunks``, ``worker``, ``reason``, ``expected_hit_tokens``,
        ``predicted_ttft_s`` and ``candidates``: per worker its residency and the terms of its score.

    Raises:
        GatewayError: the request would be refused.
    """
    path = path or ("/v1/chat/completions" if b'"messages"' in body else "/v1/completions")
    if path not in PROMPT_PATHS:
        raise BadRequest(f"Requests to {path} go to the least loaded worker; there is nothing to explain.")
    plan = await make_plan(services, b"POST", path, body)
    assert plan.request is not None and plan.model is not None
    candidates, residency = await find_residency(services, plan.model, plan.request)
    policy = copy.deepcopy(services.policy)  # a look must not take a turn
    decision = policy.decide(plan.request, candidates.fleet, residency, monotonic())
    rows = decision.breakdown(candidates.fleet)
    for row, hit, tiers in zip(rows, residency.hit_tokens.tolist(), residency.by_tier.tolist(), strict=True):
        row["hit_tokens"] = hit
        row["hit_tokens_by_tier"] = {tier.name: tokens for tier, tokens in zip(Tier, tiers, strict=True) if tokens}
    return {
        "policy": policy.name,
        "model": plan.model,
        "prompt_tokens": plan.request.prompt_tokens,
        "chunks": len(plan.request.chunks),
        "worker": candidates.fleet.names[decision.worker],
        "reason": decision.reason,
        "expected_hit_tokens": decision.expected_hit_tokens,
        "predicted_ttft_s": decision.predicted_ttft,
        "candidates": rows,
    }


def print_explanation(explanation: dict[str, Any], console: Console) -> None:
    """Print what ``explain`` returned: one line of summary, then a table with a row per candidate."""
    console.print(
        f"{explanation['worker']} by {explanation['policy']} ({explanation['reason']}): "
        f"{explanation['expected_hit_tokens']:,} of {explanation['prompt_tokens']:,} prompt tokens cached, "
        f"first token in {explanation['predicted_ttft_s']:.3f} s",
        highlight=False,
    )
    candidates = sorted(explanation["candidates"], key=lambda row: (not row["chosen"], row.get("cost", 0.0)))
    terms = [name for name in candidates[0] if name not in ("worker", "chosen")]
    table = Table("", "worker")
    for term in terms:
        table.add_column(term, justify="right")
    for row in candidates:
        table.add_row("→" if row["chosen"] else "", row["worker"], *(_cell(row.get(term)) for term in terms))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key}:{each:,}" for key, each in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
