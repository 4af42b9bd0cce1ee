"""When the benchmark of a worker's death says that copies help."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.avalanche import row_of, targets


def rows(p90_after: float = 0.4, hits_after: float = 0.95, p50_before: float = 0.05) -> dict[str, dict[str, Any]]:
    """Figures with copies; without, TTFT p90 is 1 s and hits are 0.9 after the death, p50 0.05 s before it."""
    alone = {"before": row_of([0.05], 0.98), "after": row_of([1.0], 0.9)}
    copied = {"before": row_of([p50_before], 0.98), "after": row_of([p90_after], hits_after)}
    return {
        f"{where}_{how}": row
        for where in ("simulator", "gateway")
        for how, row in (("without", alone), ("with", copied))
    }


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, set()),
        ({"p90_after": 0.6}, {"p90_after_half"}),
        ({"hits_after": 0.9}, {"hits_after_higher"}),
        ({"p50_before": 0.07}, {"costs_little_before"}),
    ],
)
def test_targets(figures: dict[str, float], missed: set[str]) -> None:
    met = targets(rows(**figures), failed=0)
    assert {name for name, yes in met.items() if not yes} == {
        f"{where}_{name}" for where in ("simulator", "gateway") for name in missed
    }


def test_a_request_that_fails_is_a_target_missed() -> None:
    met = targets(rows(), failed=1)
    assert [name for name, yes in met.items() if not yes] == ["no_request_failed"]
