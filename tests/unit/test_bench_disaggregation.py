"""The bench of moved KV: what it simulates, and what it calls a win."""

from __future__ import annotations

import pytest

from tests.bench import disaggregation
from tests.bench.disaggregation import PULLING, Job, jobs_of, run, table, wins

SMALL = {"few": ("agents:sessions=6,turns=3,task_tokens=2000", 2)}
SMALL_PULL = {"few": ("agents:sessions=6,turns=3,task_tokens=20000", 0.0)}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "APART", SMALL)
    monkeypatch.setattr(disaggregation, "PULL", SMALL_PULL)


def test_every_choice_is_simulated_with_every_seed() -> None:
    jobs = list(jobs_of("apart"))
    assert {job.choice for job in jobs} == {"always", "never", "break-even"}
    assert len(jobs) == 3 * disaggregation.SEEDS["apart"]


def test_always_moves_everything_and_never_nothing() -> None:
    always, never = (run(Job("apart", "few", policy, 0)) for policy in ("always", "never"))
    assert (always["moved_share"], never["moved_share"]) == (1, 0)
    assert always["answer_mean_s"] > always["ttft_mean_s"] > 0


def test_without_links_nothing_is_fetched() -> None:
    alone = run(Job("pull", "few", 0.0, 0))
    assert alone["moved_share"] == 0
    assert alone["hit_rate"] > 0


def test_a_win_is_less_than_with_both_others() -> None:
    values = {"always": 2.0, "never": 3.0, "break-even": 1.0}
    found = {("won", policy): {"ttft_mean_s": value} for policy, value in values.items()}
    found |= {("tied", policy): {"ttft_mean_s": max(value, 2.0)} for policy, value in values.items()}
    assert wins(found, "ttft_mean_s") == ["won"]


def test_the_table_has_a_line_per_choice() -> None:
    figures = run(Job("pull", "few", 40.0, 0))
    lines = {("few", 0.0): figures, ("few", 40.0): figures}
    assert table("pull", lines, {line: [0.0, -0.1] for line in lines}).row_count == 2


def test_turns_are_pulled_where_that_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = {"few": ("agents:sessions=24,turns=3,task_tokens=20000,spread_s=2", 2)}
    monkeypatch.setattr(disaggregation, "APART", crowded)
    monkeypatch.setattr(disaggregation, "TURNS", tuple(crowded))
    assert {job.choice for job in jobs_of("turns")} == {*PULLING}
    alone, pulled = (run(Job("turns", "few", choice, 0)) for choice in ("always", "always, pulled"))
    assert alone["moved_share"] == 0 < pulled["moved_share"]
