"""What may be sent again, how often, and after how long."""

from __future__ import annotations

import pytest

from gateway.config import RetryConfig
from gateway.relay.retry import FailureKind, RetryBudget, backoff_s, is_repeatable


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/rerank"])
def test_inference_may_run_twice(path: str) -> None:
    assert is_repeatable(b"POST", path)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/files", "/v1/load_lora_adapter", "/v1/unheard-of"])
def test_what_may_leave_something_behind_must_not_run_twice(path: str) -> None:
    assert not is_repeatable(b"POST", path)
    assert not is_repeatable(b"DELETE", path)


def test_reading_may_happen_twice() -> None:
    assert is_repeatable(b"GET", "/v1/files")


def test_a_worker_at_its_limit_is_not_blamed_nor_one_that_waited_for_another() -> None:
    blameless = {kind for kind in FailureKind if not kind.blames_worker}
    assert blameless == {
        FailureKind.EXHAUSTED,
        FailureKind.STALE,
        FailureKind.PARTNER,
        FailureKind.NO_KV,
        FailureKind.REFUSED,
    }


def spent(budget: RetryBudget, now: float) -> int:
    count = 0
    while budget.spend(now):
        count += 1
        assert count < 10_000
    return count


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget(RetryConfig(budget=0.25, budget_min_per_s=0))
    assert spent(budget, 1.0) == 0
    for _ in range(40):
        budget.earn()
    assert spent(budget, 1.0) == 10


def test_a_few_retries_per_second_are_always_allowed() -> None:
    budget = RetryBudget(RetryConfig(budget=0, budget_min_per_s=3))
    assert spent(budget, 100.0) == 3
    assert spent(budget, 100.5) == 1
    assert spent(budget, 101.0) == 2


def test_budget_that_nobody_used_does_not_pile_up_without_end() -> None:
    budget = RetryBudget(RetryConfig(budget=0.5, budget_min_per_s=2))
    spent(budget, 1.0)
    for _ in range(1_000_000):
        budget.earn()
    assert spent(budget, 1_000_000.0) == 20


def test_no_budget_means_no_retries() -> None:
    budget = RetryBudget(RetryConfig(budget=0, budget_min_per_s=0))
    for _ in range(1000):
        budget.earn()
    assert spent(budget, 1000.0) == 0


def test_the_wait_doubles_with_full_jitter_up_to_its_bound() -> None:
    config = RetryConfig(backoff_s=0.1, backoff_max_s=0.5)
    for failures, bound in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.5), (9, 0.5)):
        waits = [backoff_s(config, failures) for _ in range(300)]
        assert 0 <= min(waits) < 0.2 * bound
        assert 0.8 * bound < max(waits) <= bound
