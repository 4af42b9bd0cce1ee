"""How large the caches of ``kvway demo`` are."""

from __future__ import annotations

from gateway.demo import MODEL_FILES, TIERS, DemoOptions, fleet_tokens, infinite_cache, load_sessions
from sim.tokens import WorkerTokenizer


def test_every_worker_of_a_small_demo_takes_its_longest_request() -> None:
    _, working_set, longest = infinite_cache(load_sessions(DemoOptions(1, 2)), WorkerTokenizer(MODEL_FILES))
    smallest = min(hbm for hbm, _ in TIERS)
    assert working_set / 0.8 * smallest < longest
    assert longest <= fleet_tokens(working_set, longest) * smallest
    assert fleet_tokens(1_000_000, longest) == 1_250_000
