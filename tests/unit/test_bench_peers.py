from __future__ import annotations

from typing import Any

import pytest

from sim.load.scenario import read_scenario
from sim.profiles import find_profile
from sim.requests import SimRequest, Trace
from tests.bench.peers import KVWAY, QUICK_SOURCES, SOURCES, main, mean, targets
from tests.bench.peers_fleet import BLOCK_TOKENS, DECODING, PROFILE, busy_s, limit, read_workload, tokenized


def row(router: str, ttft_s: float, rate: float = 10.0, hit_rate: float = 0.8, **fields: Any) -> dict[str, Any]:
    times = dict.fromkeys(("ttft_p50_s", "ttft_p90_s", "ttft_p99_s"), ttft_s)
    cell = {"workload": "w", "share": 0.9, "router": router, "failed": 0, "problem": ""}
    return {**cell, **times, "requests_per_s": rate, "hit_rate": hit_rate, **fields}


def test_the_options_are_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["peers", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "at 90 % of the capacity only" in capsys.readouterr().out


BEST, FAR_BELOW = "w_90%_best", "w_90%_ttft_p90_20%_below"


@pytest.mark.parametrize(
    ("own", "other", "best", "far_below"),
    [
        (row(KVWAY, 0.79), row("peer", 1.0), True, True),
        (row(KVWAY, 0.81), row("peer", 1.0), True, False),
        (row(KVWAY, 1.01), row("peer", 1.0), False, False),
        (row(KVWAY, 0.5, hit_rate=0.7), row("peer", 1.0), False, True),
        (row(KVWAY, 0.5, rate=9.95), row("peer", 1.0), True, True),
        (row(KVWAY, 0.5, failed=1), row("peer", 1.0), False, True),
        (row(KVWAY, 0.5), row("peer", 1.0, problem="did not start"), False, False),
    ],
)
def test_targets(own: dict[str, Any], other: dict[str, Any], best: bool, far_below: bool) -> None:
    assert targets([own, other], {}) == {BEST: best, FAR_BELOW: far_below}


def test_with_an_absent_peer_no_target_is_met() -> None:
    assert not any(targets([row(KVWAY, 0.5), row("peer", 1.0)], {"other": "no network"}).values())


def test_a_cell_run_with_several_seeds_is_their_mean() -> None:
    quiet, busy = ({"seconds": 7, "saturated_s": late} for late in (0, 2))
    runs = [
        row("peer", 1.0, hit_rate=0.7, answered=100, errors={"status 503": 1}, client=quiet),
        row("peer", 2.0, hit_rate=0.8, answered=90, failed=1, errors={"status 503": 1}, client=busy),
    ]
    found = mean(runs)
    assert (found["ttft_p90_s"], found["hit_rate"], found["requests_per_s"]) == (1.5, pytest.approx(0.75), 10.0)
    assert (found["answered"], found["failed"], found["errors"]) == (190, 1, {"status 503": 2})
    assert found["client"] == {"seconds": 14, "saturated_s": 2}


def test_a_cell_is_not_measured_when_one_of_its_seeds_is_not() -> None:
    assert mean([row("peer", 1.0), row("peer", 1.0, problem="did not start")])["problem"] == "did not start"


def test_every_seed_is_another_workload() -> None:
    first, second = (read_workload("w", "code:sessions=3,turns=2", seed) for seed in (0, 1))
    assert first.sent_s != second.sent_s


def test_a_workload_costs_what_no_request_before_has_computed() -> None:
    profile = find_profile(PROFILE)
    size = 4 * BLOCK_TOKENS
    requests = [SimRequest(0, [1, 2, 3, 4], size, 16), SimRequest(1, [1, 2, 3, 5], size, 16)]
    decode = 2 * 16 * profile.itl_s(DECODING, DECODING * (size + 8)) / DECODING
    prefill = profile.ttft_s(size) + profile.ttft_s(BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert busy_s(Trace(requests, BLOCK_TOKENS)) == pytest.approx(prefill + decode)


def test_the_limit_is_of_prompts_that_find_all_that_was_before_and_wait_for_nobody() -> None:
    profile, size = find_profile(PROFILE), 4 * BLOCK_TOKENS
    requests = [SimRequest(at_s, [1, 2, 3, last], size, 16) for at_s, last in ((0, 4), (1, 5), (9, 6))]
    found = limit(Trace(requests, BLOCK_TOKENS), sent_s=1)
    cold_s, warm_s = profile.ttft_s(size), profile.ttft_s(BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert found["ttft_p50_s"] == pytest.approx((cold_s + warm_s) / 2)
    assert found["ttft_p99_s"] == pytest.approx(warm_s + 0.99 * (cold_s - warm_s))
    assert found["hit_rate"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("source", QUICK_SOURCES.values(), ids=list(QUICK_SOURCES))
def test_workloads_share_prefixes(source: str) -> None:
    trace = tokenized(read_scenario(source, loop="sessions"), "w")
    named = sum(len(request.chunks) for request in trace.requests)
    assert len({chunk for request in trace.requests for chunk in request.chunks}) < named / 2


def test_a_quick_run_has_the_same_workloads() -> None:
    assert SOURCES.keys() == QUICK_SOURCES.keys()
