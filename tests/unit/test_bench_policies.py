"""The benchmark of decisions measures what it says, and judges by the dearer case."""

import pytest

from tests.bench import policies_micro


@pytest.mark.parametrize("workers", policies_micro.FLEETS)
@pytest.mark.parametrize("continued", [True, False])
def test_decisions_are_timed(monkeypatch, workers, continued):
    monkeypatch.setattr(policies_micro, "ROUNDS", 1)
    figures = policies_micro.time_decisions(workers, continued)
    assert figures["best_us"] > 0
    assert figures["median_us"] > 0


def test_releases_are_timed_with_so_many_held(monkeypatch):
    monkeypatch.setattr(policies_micro, "RELEASE_ROUNDS", 1)
    assert policies_micro.time_releases()["best_us"] > 0


def test_a_target_is_met_when_the_dearer_kind_of_conversation_meets_it():
    decisions = {(n, case): {"best_us": 90.0} for n in policies_micro.FLEETS for case in ("continued", "new")}
    release = {"best_us": 3.0}
    assert all(policies_micro.targets(decisions, release).values())
    decisions[64, "new"]["best_us"] = 101.0
    assert policies_micro.targets(decisions, release) == {
        "decision_100us_64_workers": False,
        "decision_400us_1000_workers": True,
        "release_20us_1000_held": True,
    }
