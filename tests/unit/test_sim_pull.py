"""Prefixes that simulated workers fetch from one another: how long it takes, and what they find afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from policies import base
from policies.base import Decision, FleetView, NoParams, Residency, RoutingRequest
from policies.pull import Pull
from sim.engine import simulate
from sim.fleet import Failure, FleetSettings, PullSettings
from sim.profiles import find_profile
from sim.requests import SimRequest, Trace
from sim.results import SimResult

BLOCK = 256
PROFILE = find_profile("llama-3.1-70b/h100/4")
PREFIX = 40  # blocks
PULL = PullSettings(bytes_per_s=20e9, latency_s=0.026)


class FetchElsewhere:
    """The first request to worker 0, every other one to the next worker, which is told to fetch from worker 0."""

    name: ClassVar[str] = "fetch-elsewhere"
    Params = NoParams

    def __init__(self, params: NoParams, /) -> None:
        self._last = -1

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        self._last += 1
        row = min(self._last, len(fleet) - 1)
        tokens = residency.hit(0) - residency.hit(row)
        return Decision(row, pull=Pull(0, tokens, 0.0) if row and tokens > 0 and fleet.pulls is not None else None)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._REGISTRY, FetchElsewhere.name, FetchElsewhere)


def followers(count: int, at: float = 10.0) -> Trace:
    """One prompt, and others that begin with it, together and later."""
    prefix = tuple(range(PREFIX))
    requests = [SimRequest(0.0, prefix, PREFIX * BLOCK, 5)]
    requests += [
        SimRequest(at, (*prefix, 1000 + number), (PREFIX + 1) * BLOCK, 5, session=str(number))
        for number in range(count)
    ]
    return Trace(requests, BLOCK)


def run(trace: Trace, pull: PullSettings | None = PULL, workers: int = 2, **fields: Any) -> SimResult:
    fleet = FleetSettings(workers=workers, pull=pull, **fields)
    return simulate(trace, fleet, "fetch-elsewhere")


def fetch_s(blocks: int = PREFIX) -> float:
    return PULL.latency_s + blocks * BLOCK * PROFILE.kv_bytes_per_token / PULL.bytes_per_s


def test_a_fetched_prefix_is_not_computed_and_the_first_token_waits_for_it():
    result = run(followers(1))
    assert result.worker.tolist() == [0, 1]
    assert result.hit_tokens[1].sum() == PREFIX * BLOCK
    assert result.ttft_s[1] == pytest.approx(fetch_s() + PROFILE.ttft_s(BLOCK, PREFIX * BLOCK))
    assert result.counters["pulls"] == 1
    assert result.counters["pulled_bytes"] == PREFIX * BLOCK * PROFILE.kv_bytes_per_token


def test_without_links_the_prefix_is_computed_again():
    result = run(followers(1), pull=None)
    assert result.hit_tokens[1].sum() == 0
    assert "pulls" not in result.counters


def test_fetches_from_one_source_share_its_link():
    result = run(followers(2), workers=3)
    first, second = sorted(result.ttft_s[1:])
    assert second - first == pytest.approx(fetch_s() - PULL.latency_s)


def test_what_was_fetched_stays_with_both():
    trace = followers(1)
    later = SimRequest(20.0, tuple(range(PREFIX)), PREFIX * BLOCK, 5)
    result = run(Trace([*trace.requests, later], BLOCK))
    assert result.worker.tolist() == [0, 1, 1]
    assert result.hit_tokens[2].sum() > (PREFIX - 1) * BLOCK
    assert result.counters["pulls"] == 1


def test_what_its_source_has_lost_is_computed():
    result = run(followers(1), failures=(Failure(at_s=10.01, worker=0),))
    assert result.answered[1]
    assert result.hit_tokens[1].sum() == 0


def test_a_request_whose_worker_dies_during_the_fetch_goes_elsewhere():
    result = run(followers(1), failures=(Failure(at_s=10.01, worker=1),))
    assert result.worker.tolist() == [0, 0]
    assert result.answered.all()


def test_expected_cost_answers_sooner_with_fast_links_where_a_worker_is_overrun():
    prefix = tuple(range(100))
    requests = [SimRequest(0.0, prefix, 100 * BLOCK, 5)]
    requests += [SimRequest(20.0 + 0.01 * at, (*prefix, 1000 + at), 101 * BLOCK, 400, str(at)) for at in range(24)]
    params: Mapping[str, Any] = {"replicate": False}
    alone, pulled = (
        simulate(Trace(requests, BLOCK), FleetSettings(workers=4, max_running=8, pull=pull), "expected-cost", params)
        for pull in (None, replace(PULL, bytes_per_s=100e9))
    )
    assert pulled.counters["pulls"] > 0
    assert np.mean(pulled.ttft_s) < np.mean(alone.ttft_s)


@pytest.mark.parametrize(("field", "value"), [("bytes_per_s", 0.0), ("latency_s", -1.0)])
def test_impossible_links_are_refused(field, value):
    with pytest.raises(ValueError, match=f"pull: {field}"):
        PullSettings(**{field: value})
