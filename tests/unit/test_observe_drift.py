"""Predictions are held against reports, and what does not come true is read anew."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.config import Config, WorkerConfig
from gateway.fleet.registry import Registry, Worker
from gateway.observe.drift import FIRST_PAUSE_S, MIN_REQUESTS, Accuracy, DriftWatch

CHUNK = 256


def test_what_comes_true_to_a_chunk_is_no_drift() -> None:
    assert Accuracy(10, 10_000, stale=0, missing=10 * 255).drift(CHUNK) == 0.0


def test_nothing_expected_and_nothing_found_is_no_drift() -> None:
    assert Accuracy(10).drift(CHUNK) == 0.0


def test_everything_expected_and_nothing_found_is_nearly_all_drift() -> None:
    assert Accuracy(10, 0, stale=100_000).drift(CHUNK) == pytest.approx(1 - 10 * CHUNK / 100_000)


def test_everything_found_and_nothing_expected_likewise() -> None:
    assert Accuracy(10, 100_000, missing=100_000).drift(CHUNK) == pytest.approx(1 - 10 * CHUNK / 100_000)


class Feeds:
    """Notes who was resynced."""

    def __init__(self) -> None:
        self.resynced: list[str] = []

    def resync(self, worker: Worker) -> bool:
        self.resynced.append(worker.name)
        return True


class Rig:
    def __init__(self, **index: float) -> None:
        self.registry, self.feeds, self.now = Registry(), Feeds(), 1000.0
        self.registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name="w")))
        self.total = Accuracy()
        config = Config.model_validate({"index": index})
        self.watch = DriftWatch(config, self.registry, self.feeds, lambda: {"w": self.total}, lambda: self.now)
        self.watch.look()

    def requests(self, n: int = MIN_REQUESTS, stale: int = 0) -> None:
        """Count requests that had 1,000 tokens cached each, and see what comes of them."""
        counts = zip(self.total, (n, 1_000 * n, stale * n, 0), strict=True)
        self.total = Accuracy(*map(sum, counts))
        self.watch.look()


def test_a_worker_whose_predictions_fail_is_read_anew() -> None:
    rig = Rig()
    rig.requests(stale=0)
    assert rig.feeds.resynced == []
    assert rig.watch.drifts == {"w": 0.0}
    rig.requests(stale=4_000)
    assert rig.feeds.resynced == ["w"]
    assert rig.watch.drifts["w"] == pytest.approx((4_000 - CHUNK) / 5_000)


def test_a_few_requests_are_no_judgement() -> None:
    rig = Rig()
    rig.requests(MIN_REQUESTS - 1, stale=4_000)
    assert rig.feeds.resynced == []
    rig.requests(1, stale=4_000)
    assert rig.feeds.resynced == ["w"]


def test_a_cure_that_does_not_help_is_tried_less_and_less_often() -> None:
    rig = Rig()
    tried_at = []
    for _ in range(100):
        rig.requests(stale=4_000)
        if len(rig.feeds.resynced) > len(tried_at):
            tried_at.append(rig.now)
        rig.now += FIRST_PAUSE_S / 4
    pauses = [later - earlier for earlier, later in pairwise(tried_at)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]


def test_after_a_cure_that_helped_the_next_comes_at_once() -> None:
    rig = Rig()
    rig.requests(stale=4_000)
    rig.now += FIRST_PAUSE_S
    rig.requests()
    rig.requests(stale=4_000)
    rig.now += FIRST_PAUSE_S
    rig.requests(stale=4_000)
    assert len(rig.feeds.resynced) == 3


def test_a_bound_of_zero_means_never() -> None:
    rig = Rig(resync_drift=0)
    rig.requests(stale=4_000)
    assert rig.feeds.resynced == []
    assert rig.watch.drifts["w"] > 0.5


def test_a_worker_that_left_and_came_back_is_judged_from_there_on() -> None:
    rig = Rig()
    rig.requests(stale=4_000)
    rig.registry.remove("w")
    rig.total = Accuracy()
    rig.registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name="w")))
    rig.watch.look()
    assert rig.watch.drifts == {"w": 0.0}
