"""Who follows which worker."""

from __future__ import annotations

from collections import Counter

from gateway.sharing.ownership import first_choice

WORKERS = [f"worker-{number}:8000" for number in range(300)]
REPLICAS = ["a", "b", "c", "d"]


def test_all_replicas_agree_whatever_the_order_in_which_they_know_each_other() -> None:
    for worker in WORKERS:
        assert first_choice(worker, REPLICAS) == first_choice(worker, set(REPLICAS)) == first_choice(worker, "dbca")


def test_workers_spread_over_the_replicas() -> None:
    counts = Counter(first_choice(worker, REPLICAS) for worker in WORKERS)
    assert min(counts.values()) > 50 and max(counts.values()) < 100


def test_a_replica_that_goes_moves_only_its_own_workers() -> None:
    for worker in WORKERS:
        before = first_choice(worker, REPLICAS)
        if before != "c":
            assert first_choice(worker, ["a", "b", "d"]) == before
