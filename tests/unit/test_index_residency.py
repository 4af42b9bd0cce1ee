from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from gateway.index.residency import RowCache, Rows, all_tiers, leading_runs
from policies.base import Tier


def mask(*holders: tuple[int, Tier]) -> int:
    return sum(1 << 4 * position + tier for position, tier in holders)


def each(masks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Return the masks of chunks that are given one by one."""
    return ((mask, 1) for mask in masks)


def test_nobody_holds_anything_of_an_empty_prompt() -> None:
    residency = leading_runs([], Rows([0, 1, -1]), 256)
    assert residency.hit_tokens.tolist() == [0, 0, 0]
    assert residency.by_tier.shape == (3, 4)


def test_no_rows_make_an_empty_result() -> None:
    assert leading_runs(each([mask((0, Tier.HBM))]), Rows([]), 256).by_tier.shape == (0, 4)


def test_a_run_goes_on_across_tiers_and_ends_at_the_first_chunk_held_in_none() -> None:
    masks = [mask((3, tier)) for tier in (Tier.HBM, Tier.HBM, Tier.HOST, Tier.REMOTE, Tier.HBM)]
    residency = leading_runs(each([*masks, 0, masks[0]]), Rows([3]), 10)
    assert residency.hit_tokens.tolist() == [50]
    assert residency.by_tier.tolist() == [[30, 10, 0, 10]]


def test_the_fastest_of_several_tiers_counts() -> None:
    everywhere, below = all_tiers(0), mask((0, Tier.DISK), (0, Tier.REMOTE))
    assert leading_runs(each([everywhere, below]), Rows([0]), 1).by_tier.tolist() == [[1, 0, 1, 0]]


def test_whoever_misses_the_first_chunk_has_no_run() -> None:
    masks = [mask((0, Tier.HBM)), mask((0, Tier.HBM), (1, Tier.HBM))]
    assert leading_runs(each(masks), Rows([0, 1]), 1).hit_tokens.tolist() == [2, 0]


def test_rows_may_be_in_any_order_repeat_and_stand_for_nobody() -> None:
    masks = [mask((2, Tier.HBM), (5, Tier.HBM)), mask((5, Tier.HOST))]
    residency = leading_runs(each(masks), Rows([5, -1, 2, 5, 7]), 1)
    assert residency.hit_tokens.tolist() == [2, 0, 1, 2, 0]


@pytest.mark.parametrize("n", [1, 12, 13, 1000])
def test_any_number_of_workers_may_leave_at_once(n: int) -> None:
    everyone = mask(*((position, Tier.HBM) for position in range(n)))
    residency = leading_runs([(everyone, 2), (0, 1)], Rows(range(n)), 256)
    assert residency.hit_tokens.tolist() == [512] * n


def test_nearly_everyone_may_leave_at_once_some_of_them_a_lower_tier() -> None:
    tiers = [Tier.HOST if position in (3, 500) else Tier.HBM for position in range(1000)]
    stays = mask((7, Tier.HBM), (500, Tier.HOST))
    residency = leading_runs([(mask(*enumerate(tiers)), 2), (stays, 1)], Rows([*range(1000), -1, 1200]), 1)
    expected = [[0, 2, 0, 0] if tier is Tier.HOST else [2, 0, 0, 0] for tier in tiers]
    expected[7], expected[500] = [3, 0, 0, 0], [0, 3, 0, 0]
    assert residency.by_tier.tolist() == [*expected, [0] * 4, [0] * 4]
    assert residency.hit_tokens.tolist() == [sum(row) for row in residency.by_tier.tolist()]


def test_masks_are_read_only_as_far_as_somebodys_run_goes() -> None:
    masks = iter([mask((0, Tier.HBM)), mask((1, Tier.HBM)), 7, 8, 9])
    leading_runs(each(masks), Rows([0]), 1)
    assert next(masks) == 7


def test_rows_are_found_again_for_the_same_list_until_positions_change() -> None:
    positions = {10: 0, 11: 1}
    cache = RowCache(positions.__getitem__)
    slots = [10, 11]
    rows = cache.rows(slots)
    assert cache.rows(slots) is rows
    assert cache.rows([10, 11]) is not rows
    positions[10] = 2
    cache.clear()
    assert cache.rows(slots).row_of.tolist() == [2, 1]


def test_a_row_cache_is_bounded() -> None:
    cache = RowCache(int)
    lists = [[number] for number in range(1000)]
    for slots in lists:
        assert cache.rows(slots).row_of.tolist() == slots
    assert len(cache._rows) <= 64
