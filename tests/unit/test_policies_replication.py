"""Which prefixes get a second home, where, and for how much."""

from __future__ import annotations

from math import inf

import pytest

from policies.replication import Allowance, PrefixUses, new_homes


def counted(*prompts: str) -> PrefixUses[str]:
    """Prompts are words; a chunk is a letter with all those before it."""
    uses: PrefixUses[str] = PrefixUses()
    for prompt in prompts:
        uses.count([prompt[: end + 1] for end in range(len(prompt))])
    return uses


def found(uses: PrefixUses[str], least: int) -> list[tuple[str, int]]:
    return [(prefix.chunks[-1], prefix.uses) for prefix in uses.take(least)]


def test_the_longest_prefix_that_enough_prompts_share_is_hot() -> None:
    assert found(counted("abcx", "abcy", "abcz", "abd"), 3) == [("abc", 3), ("ab", 4)][::-1]
    assert found(counted("abcx", "abcy", "abcz", "abd"), 4) == [("ab", 4)]
    assert found(counted("abcx", "abcy", "abcz", "abd"), 5) == []


def test_the_most_used_prefixes_come_first() -> None:
    uses = counted(*["s1"] * 3, *["t1"] * 7, *["u1"] * 5)
    assert [end for end, _ in found(uses, 2)] == ["t1", "u1", "s1"]


def test_an_example_begins_with_the_prefix() -> None:
    [prefix] = counted("system, one", "system, two").take(2)
    assert prefix.example in ("system, one", "system, two")
    assert list(prefix.chunks) == [prefix.example[: end + 1] for end in range(len("system, "))]


def test_counting_begins_anew_with_every_look_and_prompts_without_chunks_do_not_count() -> None:
    uses = counted("ab", "ab", "")
    assert found(uses, 2) == [("ab", 2)]
    uses.count(["a", "ab"])
    assert found(uses, 2) == []


DOMAINS = ["a", "a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("holders", "costs", "wanted", "homes"),
    [
        ([0], [0.0, 0.0, 2.0, 1.0, 3.0], 2, [3]),  # the cheapest, but not in the holder's domain
        ([0], [0.0, 0.0, 2.0, 1.0, 3.0], 3, [3, 4]),  # each in a domain of its own
        ([0, 1], [0.0, 0.0, 2.0, 1.0, 3.0], 2, [3]),  # two holders in one domain are one home
        ([0, 2], [0.0] * 5, 2, []),
        ([], [0.0] * 5, 2, []),  # nothing to copy
        ([0], [0.0, 0.0, inf, inf, 9.0], 2, [4]),
        ([0], [0.0, 0.0, inf, inf, inf], 2, []),
    ],
)
def test_new_homes(holders: list[int], costs: list[float], wanted: int, homes: list[int]) -> None:
    assert new_homes(holders, DOMAINS, costs, wanted) == homes


def test_what_is_spent_over_a_long_time_is_what_was_earned() -> None:
    allowance, spent = Allowance(saved_s=10.0, since=0.0), 0
    for second in range(1, 1001):
        allowance.earn(100.0, float(second))
        spent += 5000 if allowance.spend(5000) else 0
    assert 100_000 - 5000 <= spent <= 100_000 + 5000


def test_no_more_is_saved_than_for_so_long() -> None:
    allowance = Allowance(saved_s=10.0, since=0.0)
    allowance.earn(100.0, 1e6)
    assert [allowance.spend(400) for _ in range(4)] == [True, True, True, False]


def test_an_allowance_is_overdrawn_once_and_says_how_long_the_next_waits() -> None:
    allowance = Allowance(saved_s=60.0, since=-60.0)
    allowance.earn(10.0, 0.0)
    assert allowance.spend(900) and not allowance.spend(1)
    assert allowance.wait_s(10.0) == pytest.approx(30.1)
    allowance.earn(10.0, 30.1)
    assert allowance.wait_s(10.0) == pytest.approx(0.0) and allowance.spend(1)


def test_nothing_can_be_spent_before_anything_is_earned() -> None:
    assert not Allowance(saved_s=10.0, since=0.0).spend(1)
