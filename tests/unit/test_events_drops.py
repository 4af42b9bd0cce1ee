"""Which announcements in a pool are older than the removals that were heard."""

from __future__ import annotations

from gateway.events.drops import Dropped, Drops


def test_the_later_of_an_announcement_and_a_removal_counts() -> None:
    drops = Drops()
    assert drops.add([1, 2], at=5.0) == [1, 2]
    assert drops.gone([1, 2, 3], at=4.0) == [1, 2]
    assert drops.gone([1, 2, 3], at=5.0) == []  # one batch says both, in its order


def test_a_removal_is_news_once_and_an_older_one_never() -> None:
    drops = Drops()
    drops.add([1, 2], at=5.0)
    assert drops.add([1, 2, 3], at=5.0) == [3]
    assert drops.add([1], at=4.0) == []
    assert drops.add([1], at=6.0) == [1]


def test_of_what_was_announced_before_the_oldest_removal_remembered_nothing_is_sure() -> None:
    drops = Drops(max_blocks=2)
    drops.add([1], at=5.0)
    drops.add([2], at=6.0)
    drops.add([1], at=7.0)
    assert (drops.since, drops.gone([3], at=1.0)) == (0.0, [])
    drops.add([b"4"], at=8.0)
    assert (drops.since, drops.gone([3], at=5.5), drops.gone([3], at=6.0)) == (6.0, [3], [])
    assert drops.told("store") == [Dropped("store", 7.0, [1]), Dropped("store", 8.0, [b"4"])]
