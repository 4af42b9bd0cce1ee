"""The simulator is as true as its documentation says, as far as that can be held in seconds."""

from __future__ import annotations

import pytest

from tests.bench.fidelity import bounds, constants, targets
from tests.bench.sim import MOONCAKE, TRACES


def test_prompts_and_batches_take_what_the_kernel_tables_say() -> None:
    rows = constants()
    assert len(rows) == 30
    assert targets({"constants": rows}) == {"constants_within_10_percent": True}


@pytest.mark.skipif(not (TRACES / MOONCAKE).exists(), reason=f"the published traces are not in {TRACES}")
def test_a_worker_hits_what_an_lru_cache_of_its_size_holds() -> None:
    assert targets({"bounds": bounds(requests=1_000)}) == {"hit_rates_within_0.1_points": True}
