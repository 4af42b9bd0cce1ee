"""The simulator is as true as its documentation says, as far as that can be held in seconds."""

from __future__ import annotations

import pytest

from tests.bench.fidelity import TooLate, bounds, check_times, constants, targets
from tests.bench.sim import MOONCAKE, TRACES


def test_prompts_and_batches_take_what_the_kernel_tables_say() -> None:
    rows = constants()
    assert len(rows) == 30
    assert targets({"constants": rows}) == {"constants_within_10_percent": True}


@pytest.mark.skipif(not (TRACES / MOONCAKE).exists(), reason=f"the published traces are not in {TRACES}")
def test_a_worker_hits_what_an_lru_cache_of_its_size_holds() -> None:
    assert targets({"bounds": bounds(requests=1_000)}) == {"hit_rates_within_0.1_points": True}


@pytest.mark.parametrize(("late", "behind", "slower"), [(0.06, 0.0, "0.2"), (0.0, 0.04, "0.1")])
def test_a_run_on_a_machine_that_was_too_busy_is_void_and_says_what_would_do(
    late: float, behind: float, slower: str
) -> None:
    check_times(late=0.02, behind=0.005, speed=1.0)
    with pytest.raises(TooLate, match=f"--speed {slower}, or a quieter hour"):
        check_times(late, behind, speed=1.0)
