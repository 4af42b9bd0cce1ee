"""The benchmark of policies measures what it says, and judges by the dearer case and the best baseline."""

from pathlib import Path

import pytest

from tests.bench import policies_micro
from tests.bench.policies_cells import CELLS, CLAUDE_CODE, DECISIVE, Cell, Setting, trace_of
from tests.bench.policies_evaluation import DEFAULT, NEVER_EVICTS, TRACES, Job, run
from tests.bench.policies_targets import LIMIT, OURS, best_baseline, gain, targets, wanted


@pytest.mark.parametrize("workers", policies_micro.FLEETS)
@pytest.mark.parametrize("case", policies_micro.CASES)
def test_decisions_are_timed(monkeypatch, workers, case):
    monkeypatch.setattr(policies_micro, "ROUNDS", 1)
    figures = policies_micro.time_decisions(workers, case)
    assert figures["best_us"] > 0
    assert figures["median_us"] > 0


def test_releases_are_timed_with_so_many_held(monkeypatch):
    monkeypatch.setattr(policies_micro, "RELEASE_ROUNDS", 1)
    assert policies_micro.time_releases()["best_us"] > 0


def test_a_target_is_met_when_the_dearer_kind_of_conversation_meets_it():
    decisions = {(n, case): {"best_us": 90.0} for n in policies_micro.FLEETS for case in policies_micro.CASES}
    release = {"best_us": 3.0}
    assert all(policies_micro.targets(decisions, release).values())
    decisions[64, "new"]["best_us"] = 101.0
    assert policies_micro.targets(decisions, release) == {
        "decision_100us_64_workers": False,
        "decision_400us_1000_workers": True,
        "release_20us_1000_held": True,
    }


CELL = Cell("claude-code", 1.2)
SMALL = Setting(TRACES, workers=2, turns=10)


def figures(ttft_s: float, requests_per_s: float = 1.0, collapsed: float = 0.0) -> dict[str, float]:
    return {
        "ttft_mean_s": ttft_s,
        "ttft_p99_s": 10 * ttft_s,
        "requests_per_s": requests_per_s,
        "collapsed": collapsed,
    }


def test_the_best_baseline_is_the_one_to_beat_seed_by_seed():
    found = {OURS: [figures(2), figures(6)], "sticky": [figures(4), figures(8)], "random": [figures(9), figures(9)]}
    assert best_baseline(found) == "sticky"
    assert best_baseline(found | {LIMIT: [figures(1), figures(1)]}) == "sticky"
    change = gain(found[OURS], found["sticky"], "ttft_mean_s")
    assert change.mean == pytest.approx((-0.5 - 0.25) / 2)
    assert change.error == pytest.approx(0.125)


def test_a_cell_is_held_to_its_latency_its_throughput_and_its_tail():
    found = {OURS: [figures(7, 1.1)], "sticky": [figures(10)]}
    assert targets({CELL.name: found}, [CELL]) == {
        "claude-code_1.2_hbm_ttft_-25%": True,
        "claude-code_1.2_hbm_throughput_+8%": True,
        "claude-code_1.2_hbm_ttft_p99_-50%": False,
        "claude-code_1.2_hbm_no_collapse": True,
    }


def test_what_was_not_measured_was_not_met():
    assert not any(targets({}, CELLS).values())


def test_one_collapse_fails_the_cell():
    found = {OURS: [figures(1), figures(1, collapsed=1.0)], "sticky": [figures(10), figures(10)]}
    assert targets({CELL.name: found}, [CELL])["claude-code_1.2_hbm_no_collapse"] is False


def test_every_cell_has_a_name_and_targets_of_its_own():
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert set(DECISIVE) <= set(CELLS)
    assert all(wanted(cell).ttft <= 0.02 for cell in CELLS)


def test_tuning_and_report_share_no_traffic():
    cell = Cell("saas", 0.8)
    tune, report = (trace_of(cell, Setting(Path(), part, workers=1, requests=50), 0) for part in ("tune", "report"))
    assert [request.prompt_tokens for request in tune.requests] != [
        request.prompt_tokens for request in report.requests
    ]


def test_figures_say_who_was_busiest_and_who_waited_longest():
    job = Job(Cell("saas", 0.8), Setting(Path(), workers=2, requests=300), 0, DEFAULT)
    found = run(job)
    assert 1 <= found["imbalance"] < 2
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"]
    assert found["longest_wait_s"] > 0
    assert 0 < found["kv_in_use"] < 1
    assert not found["collapsed"]


def test_the_limit_is_the_same_load_on_a_cache_that_is_never_full():
    setting = Setting(Path(), workers=2, requests=300)
    bounded, unbounded = (run(Job(Cell("saas", 0.8), setting, 0, entrant)) for entrant in (DEFAULT, NEVER_EVICTS))
    assert unbounded["requests_per_s"] == bounded["requests_per_s"]
    assert unbounded["kv_in_use"] == pytest.approx(bounded["kv_in_use"] / NEVER_EVICTS.hbm, rel=0.2)


@pytest.mark.slow
@pytest.mark.skipif(not (TRACES / CLAUDE_CODE).exists(), reason=f"{TRACES / CLAUDE_CODE} is not there")
def test_users_follow_from_the_working_set_over_the_capacity():
    few, many = (
        len({request.session for request in trace_of(Cell("claude-code", ratio), SMALL, 0).requests})
        for ratio in (0.6, 1.2)
    )
    assert many == pytest.approx(2 * few, abs=1)
