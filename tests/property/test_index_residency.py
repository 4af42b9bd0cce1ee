from __future__ import annotations

from itertools import groupby

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.index.residency import Rows, leading_runs
from policies.base import N_TIERS, Tier

WIDTH = 40


def naive(masks: list[int], positions: list[int], chunk_tokens: int) -> list[list[int]]:
    rows = []
    for position in positions:
        row = [0] * N_TIERS
        for mask in masks:
            tiers = [tier for tier in Tier if position >= 0 and mask >> N_TIERS * position + tier & 1]
            if not tiers:
                break
            row[tiers[0]] += chunk_tokens
        rows.append(row)
    return rows


# Few different masks, often repeated, and dense enough for runs to last.
_MASKS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 15), max_size=WIDTH).map(
            lambda nibbles: sum(nibble << N_TIERS * position for position, nibble in enumerate(nibbles))
        ),
        st.integers(0, (1 << N_TIERS * WIDTH) - 1),
        st.integers(1, 4),
    ).map(lambda drawn: [drawn[0] | drawn[1]] * drawn[2]),
    max_size=6,
).map(lambda runs: [mask for run in runs for mask in run])


@given(_MASKS, st.lists(st.integers(-1, WIDTH + 3), max_size=50), st.integers(1, 512))
@example([], [0, -1], 16)
@example([0b0001, 0b0010, 0b1100, 0b0011], [0], 16)
@example([int("1" * WIDTH, 16), int("2" * WIDTH, 16), int("1" * 5, 16)], list(range(WIDTH)), 1)
def test_leading_runs_are_those_of_the_definition(masks: list[int], positions: list[int], chunk_tokens: int) -> None:
    residency = leading_runs(((mask, 1) for mask in masks), Rows(positions), chunk_tokens)
    together = leading_runs(((mask, len(list(same))) for mask, same in groupby(masks)), Rows(positions), chunk_tokens)
    expected = naive(masks, positions, chunk_tokens)
    assert residency.by_tier.tolist() == together.by_tier.tolist() == expected
    assert residency.hit_tokens.tolist() == [sum(row) for row in expected]
