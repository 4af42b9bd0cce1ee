"""Whether workers that prefill and workers that decode can hand KV over to one another."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.check.findings import Notebook
from gateway.config import WorkerConfig


def look_at_role(worker: WorkerConfig, fleet: Sequence[WorkerConfig], notes: Notebook) -> None:
    """Note whether a worker of one role has partners of the other one, which need the same protocol.

    Args:
        worker: whose role.
        fleet: all workers.
        notes: of this worker.
    """
    if worker.role == "mixed":
        return
    prefills = worker.role == "prefill"
    others = [other for other in fleet if (other.role == "prefill") != prefills]
    partners = [
        other.label
        for other in others
        if (other.takes_over_from(worker) if prefills else worker.takes_over_from(other))
    ]
    if partners:
        notes.ok("role", f"{worker.role} by {worker.pd}, with {', '.join(partners)}")
        return
    wanted = "decode" if prefills else "prefill"
    there = ", ".join(f"{other.label} by {other.pd}" for other in others) or "none there"
    message = f"{worker.role} by {worker.pd}, and no {wanted} worker does so: {there}"
    notes.problem("role", message, f"add a {wanted} worker with pd {worker.pd}, or correct role and pd in workers:")
