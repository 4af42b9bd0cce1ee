"""Why a request would go where it would go."""

from __future__ import annotations

import copy
from time import monotonic
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from gateway.admin.explain_pairs import explain_pairs, print_pairs
from gateway.admin.explain_pieces import explain_pieces, line_of
from gateway.relay.plan import make_plan, prompt_path
from gateway.relay.route import decide, find_residency
from gateway.relay.services import Services
from policies.base import Tier

_MAX_SHOWN: Final = 4


async def explain(services: Services, path: str, body: bytes) -> dict[str, Any]:
    """Decide about a request without sending or counting it.

    Args:
        services: the gateway's rooms.
        path: of the request, one of ``PROMPT_PATHS``; empty: found from the body, an OpenAI chat or completion.
        body: the request's body.

    Returns:
        ``policy``, ``model``, ``prompt_tokens``, ``chunks``, ``worker``, ``reason``, ``expected_hit_tokens``,
        ``predicted_ttft_s``, ``prefill`` (see ``explain_pieces``) and ``candidates``: per worker its residency and the
        terms of its score. Where workers have roles, ``disaggregation``, too: see ``explain_pairs``; ``candidates`` and
        ``prefill`` then are about staying whole.

    Raises:
        GatewayError: the request would be refused.
    """
    path = prompt_path(path, body)
    plan = await make_plan(services, b"POST", path, body, counts=False)
    assert plan.request is not None and plan.model is not None and plan.policy is not None
    candidates, residency = await find_residency(services, plan.model, plan.request)
    policy = copy.deepcopy(plan.policy)  # a look must not take a turn
    now = monotonic()
    services.ledger.advance(now)
    decision = decide(services, policy, plan.request, candidates.fleet, residency, now)
    rows = decision.breakdown(candidates.fleet)
    for row, hit, tiers in zip(rows, residency.hit_tokens.tolist(), residency.by_tier.tolist(), strict=True):
        row["hit_tokens"] = hit
        row |= {f"{tier.name.lower()}_tokens": tokens for tier, tokens in zip(Tier, tiers, strict=True)}
        if candidates.fleet.pulls is not None:
            row["fetch_gb_s"] = services.fetches.bytes_per_s(services.registry.workers[row["worker"]]) / 1e9
        if services.dispatcher is not None:
            row["held_requests"], row["held_s"] = services.dispatcher.waiting(services.registry.workers[row["worker"]])
    explanation = {
        "policy": policy.name,
        "model": plan.model,
        "prompt_tokens": plan.request.prompt_tokens,
        "chunks": len(plan.request.chunks),
        "worker": candidates.fleet.names[decision.worker],
        "reason": decision.reason,
        "expected_hit_tokens": int(decision.expected_hit_tokens),
        "predicted_ttft_s": float(decision.predicted_ttft),
        "prefill": explain_pieces(services, plan, candidates.workers[decision.worker], decision),
        "candidates": rows,
    }
    if services.registry.apart:
        explanation["disaggregation"] = await explain_pairs(services, plan, path, body)
    return explanation


def print_explanation(explanation: dict[str, Any], console: Console) -> None:
    """Print what ``explain`` returned: two lines of summary, then the terms of the chosen and the next candidates."""
    if "disaggregation" in explanation:
        print_pairs(explanation["disaggregation"], console)
        if explanation["disaggregation"]["apart"]:
            return
    console.print(
        f"{explanation['worker']} by {explanation['policy']} ({explanation['reason']}): "
        f"{explanation['expected_hit_tokens']:,} of {explanation['prompt_tokens']:,} prompt tokens cached, "
        f"first token in {explanation['predicted_ttft_s']:.3f} s",
        highlight=False,
    )
    console.print(line_of(explanation["prefill"]), highlight=False)
    candidates = sorted(explanation["candidates"], key=lambda row: (not row["chosen"], row.get("cost", 0.0)))
    shown = candidates[:_MAX_SHOWN]
    table = Table("term")
    for row in shown:
        table.add_column(f"→ {row['worker']}" if row["chosen"] else row["worker"], justify="right", overflow="fold")
    for term in shown[0]:
        if term not in ("worker", "chosen") and any(row[term] for row in shown):
            table.add_row(term, *(_cell(row[term]) for row in shown))
    console.print(table)
    if len(candidates) > len(shown):
        console.print(f"{len(candidates) - len(shown)} more candidates: --json prints them all")


def _cell(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
