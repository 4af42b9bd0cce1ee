"""The speeds that kvway is to have, as yes or no."""

from __future__ import annotations

from tests.bench.measure import Figures
from tests.bench.results import KVWAY, RUST, Results

CPU_US_PER_CHUNK = 12.0
ADDED_P99_MS = 1.5
# Memory counts as flat when it grew by less: allocators round up.
FLAT = 1.05


def targets(results: Results) -> dict[str, bool]:
    """Return for each target whether it was met; what was not measured was not met."""
    return {
        "short_json_1.5x_faster_rust": _at_least(results.speed_ratio("short_json"), 1.5),
        "long_json_1.5x_faster_rust": _at_least(results.speed_ratio("long_json"), 1.5),
        "short_sse_chunks_1.0x_faster_rust": _at_least(results.speed_ratio("short_sse"), 1.0),
        "long_sse_chunks_1.0x_faster_rust": _at_least(results.speed_ratio("long_sse"), 1.0),
        "paced_sse_p99_delay_below_rust": _below_rust(results.medians("paced_sse"), "p99_ms"),
        "short_added_p50_below_rust": _below_rust(results.added("short_latency"), "p50_ms"),
        "long_added_p50_below_rust": _below_rust(results.added("long_latency"), "p50_ms"),
        "long_added_p99_1.5ms": _at_most(results.added("long_latency"), "p99_ms", ADDED_P99_MS),
        "cpu_per_chunk_12us": _at_most(results.medians("short_sse"), "cpu_us", CPU_US_PER_CHUNK),
        "memory_flat_over_requests": _flat(results, "requests", "warm_mib", "most_mib"),
        "memory_flat_over_streams": _flat(results, "streams", "first_wave_mib", "last_wave_mib"),
    }


def _at_least(ratio: float | None, wanted: float) -> bool:
    return ratio is not None and ratio >= wanted


def _at_most(figures: dict[str, Figures], key: str, limit: float) -> bool:
    return KVWAY in figures and figures[KVWAY][key] <= limit


def _below_rust(figures: dict[str, Figures], key: str) -> bool:
    if not {KVWAY, *RUST} <= figures.keys():
        return False
    return figures[KVWAY][key] <= min(figures[rival][key] for rival in RUST)


def _flat(results: Results, kind: str, before: str, after: str) -> bool:
    measured = results.memory.get(KVWAY)
    return measured is not None and measured[kind][after] <= FLAT * measured[kind][before]
