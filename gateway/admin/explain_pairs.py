"""Why a request would go over two workers, or would not."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console
from rich.table import Table

from gateway.relay.legs import sequences
from gateway.relay.pairing import Pairing, judge
from gateway.relay.plan import Plan
from gateway.relay.services import Services

_MAX_PAIRS: Final = 3  # beside whom the best single worker is shown
_WHY: Final = {
    "form": "requests of this form stay whole",
    "no_prefill_worker": "no prefill worker is ready",
    "no_pair": "no prefill worker has the protocol of a decode worker that is ready",
    "never": "disaggregation.policy is never",
    "always": "disaggregation.policy is always",
    "sglang": "SGLang's workers cannot do otherwise",
}


async def explain_pairs(services: Services, plan: Plan, path: str, body: bytes) -> dict[str, Any]:
    """Decide whether a request would go over two workers.

    Args:
        services: the gateway's rooms.
        plan: of the request.
        path: of the request.
        body: the request's body.

    Returns:
        ``apart`` and ``why`` (``gateway.relay.pairing.Verdict``). Where it was calculated: ``prefill`` and ``decode``,
        the chosen workers; ``pairs``, each prefill worker with the best partner for it, the cheapest pair first; and
        ``whole``, the same for each worker that would do both. Seconds of TTFT, as in ``policies.disaggregation``.
    """
    verdict = await judge(services, plan, sequences(path, body))
    found: dict[str, Any] = {"apart": verdict.apart, "why": verdict.why}
    if verdict.pairing is None or (chosen := verdict.pairing.choose()) is None:
        return found
    pairs = [row | {"chosen": row["prefill"] == chosen.prefill.name} for row in _pairs(verdict.pairing)]
    return found | {
        "prefill": chosen.prefill.name,
        "decode": chosen.decode.name,
        "hit_tokens": chosen.hit_tokens,
        "pairs": sorted(pairs, key=lambda row: (not row["chosen"], row["cost"])),
        "whole": sorted(_whole(services, verdict.pairing), key=lambda row: float(row["cost"])),
    }


def _pairs(pairing: Pairing) -> list[dict[str, Any]]:
    comparison = pairing.comparison
    there, here = comparison.there, comparison.here
    rows = []
    for row, (worker, column) in enumerate(zip(pairing.prefills.workers, comparison.apart_s.argmin(1), strict=True)):
        cost = float(comparison.apart_s[row, column])
        if cost < float("inf"):  # the two have a protocol in common
            rows.append(
                {
                    "prefill": worker.name,
                    "decode": pairing.decodes.workers[column].name,
                    "cost": cost,
                    "hit_tokens": int(there.held_tokens[row]),
                    "wait_s": float(there.wait_s[row]),
                    "work_s": float(there.work_s[row]),
                    "transfer_s": float(comparison.transfer_s[row, column]),
                    "decode_wait_s": float(here.wait_s[column]),
                    "step_s": float(here.step_s[column]),
                    "decode_s": float(here.decode_s[column]),
                }
            )
    return rows


def _whole(services: Services, pairing: Pairing) -> list[dict[str, Any]]:
    here, interference = pairing.comparison.here, services.config.disaggregation.interference
    return [
        {
            "worker": worker.name,
            "cost": float(pairing.comparison.whole_s[row]),
            "hit_tokens": int(here.held_tokens[row]),
            "wait_s": float(here.wait_s[row]),
            "work_s": float(here.work_s[row]),
            "interference_s": float(here.work_s[row] * here.running[row] * interference),
            "decode_s": float(here.decode_s[row]),
        }
        for row, worker in enumerate(pairing.decodes.workers)
    ]


def print_pairs(explained: dict[str, Any], console: Console) -> None:
    """Print what ``explain_pairs`` returned: one line of summary, then the terms of the best ways."""
    way = "whole, on one worker"
    if explained["apart"]:
        way = f"apart, {explained['prefill']} prefills and {explained['decode']} decodes"
    pairs, whole = explained.get("pairs", []), explained.get("whole", [])
    why = _WHY.get(explained["why"], "")
    if not why:
        why = f"break-even: {pairs[0]['cost']:.3f} s apart, {whole[0]['cost']:.3f} s whole"
    console.print(f"{way} ({why})", highlight=False)
    if not pairs:
        return
    shown = [(f"{row['prefill']} → {row['decode']}", row) for row in pairs[:_MAX_PAIRS]]
    shown.append((f"whole on {whole[0]['worker']}", whole[0]))
    table = Table("term")
    for name, _ in shown:
        table.add_column(name, justify="right", overflow="fold")
    terms = [term for term in {**pairs[0], **whole[0]} if term not in ("prefill", "decode", "worker", "chosen")]
    for term in terms:
        table.add_row(term, *(f"{row[term]:.4g}" if term in row else "" for _, row in shown))
    console.print(table)
