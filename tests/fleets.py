"""Small fleets and requests for the policies' tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.base import N_TIERS, FleetView, Residency, RoutingRequest, Tier
from policies.chunks import ChunkHasher

CHUNK = 256
# Llama 70B on four H100: seconds, seconds per token, seconds per token and context token
PREFILL = (0.011, 58e-6, 1.05e-9)


def make_fleet(n: int, capacity: float = 0, **columns: float | Sequence[float]) -> FleetView:
    """Return ``n`` workers called ``worker-0``… of equal speed, with the given columns."""
    fleet = FleetView([f"worker-{number}" for number in range(n)])
    fleet.kv_capacity_tokens[:] = capacity
    fleet.prefill_a_s[:], fleet.prefill_b_s[:], fleet.prefill_c_s[:] = PREFILL
    for name, values in columns.items():
        fleet.column(name)[:] = values
    return fleet


def make_residency(hits: Sequence[int], tier: Tier = Tier.HBM) -> Residency:
    """Return a residency where every hit lies in one tier."""
    by_tier = np.zeros((len(hits), N_TIERS), np.int64)
    by_tier[:, tier] = hits
    return Residency(np.array(hits, np.int64), by_tier)


def make_request(prompt_tokens: int, conversation: int = 0, **fields: object) -> RoutingRequest:
    """Return a request whose chunks belong to ``conversation``."""
    chunks = [b"%d/%d" % (conversation, number) for number in range(prompt_tokens // CHUNK)]
    return RoutingRequest("llama", prompt_tokens, chunks, CHUNK, **fields)  # type: ignore[arg-type]


def make_chain(hasher: ChunkHasher, root: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return the chunk hashes of token ids."""
    return hasher.chain(root, np.array(tokens, "<u4").tobytes())
