from __future__ import annotations

import pytest

from tests.bench.results import KVWAY, RUST, Results
from tests.bench.targets import targets


def figures(rate: float, cpu_us: float = 100.0, router_share: float = 1.0) -> dict[str, float]:
    return {"rate": rate, "cpu_us": cpu_us, "router_share": router_share, "load_share": 0.5, "others_share": 0.0}


def round_of(ours: dict[str, float], *rivals: dict[str, float]) -> dict[str, dict[str, float]]:
    return {KVWAY: ours, **dict(zip(RUST, rivals, strict=True))}


def test_the_faster_rust_router_of_a_round_is_the_one_compared_with() -> None:
    results = Results()
    results.rounds["short_json"] = [round_of(figures(300), figures(100), figures(150))]
    assert results.speed_ratio("short_json") == pytest.approx(2.0)


def test_ratios_are_taken_within_a_round_and_their_median_counts() -> None:
    results = Results()
    results.rounds["short_json"] = [
        round_of(figures(100), figures(50), figures(50)),
        round_of(figures(10), figures(10), figures(5)),
        round_of(figures(900), figures(300), figures(300)),
    ]
    assert results.speed_ratio("short_json") == pytest.approx(2.0)


def test_routers_that_were_not_saturated_are_compared_by_cpu() -> None:
    results = Results()
    ours = figures(100, cpu_us=10, router_share=0.6)
    results.rounds["short_sse"] = [round_of(ours, figures(100, cpu_us=12), figures(100, cpu_us=30))]
    assert results.speed_ratio("short_sse") == pytest.approx(1.2)


def test_a_missing_rust_router_makes_its_targets_false() -> None:
    results = Results()
    results.rounds["short_json"] = [{KVWAY: figures(300), RUST[0]: figures(100)}]
    assert results.speed_ratio("short_json") is None
    assert not targets(results)["short_json_1.5x_faster_rust"]


def test_a_round_in_which_kvway_failed_makes_its_targets_false() -> None:
    results = Results()
    results.rounds["short_sse"] = [
        round_of(figures(300, cpu_us=5), figures(100), figures(100)),
        {rival: figures(100) for rival in RUST},
    ]
    assert results.speed_ratio("short_sse") is None
    assert KVWAY not in results.medians("short_sse")
    assert not targets(results)["cpu_per_chunk_12us"]


def test_what_was_not_measured_was_not_met() -> None:
    assert not any(targets(Results()).values())


def test_added_latency_is_above_that_of_the_upstream_in_the_same_round() -> None:
    results = Results()
    results.rounds["long_latency"] = [
        {"direct": {"p50_ms": 1.0, "p99_ms": 2.0}, KVWAY: {"p50_ms": 1.5, "p99_ms": 3.0}},
        {"direct": {"p50_ms": 2.0, "p99_ms": 4.0}, KVWAY: {"p50_ms": 2.5, "p99_ms": 5.0}},
    ]
    assert results.added("long_latency") == {KVWAY: {"p50_ms": 0.5, "p99_ms": 1.0}}
    assert targets(results)["long_added_p99_1.5ms"]


def test_memory_is_flat_within_five_percent() -> None:
    results = Results()
    results.memory[KVWAY] = {
        "requests": {"warm_mib": 100.0, "most_mib": 104.0},
        "streams": {"first_wave_mib": 100.0, "last_wave_mib": 106.0},
    }
    assert targets(results)["memory_flat_over_requests"]
    assert not targets(results)["memory_flat_over_streams"]
