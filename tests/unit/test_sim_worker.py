from __future__ import annotations

from array import array
from itertools import count

import pytest

from policies.base import Tier
from sim.cache import AllCleared, BlockRemoved, BlocksStored, CacheEvent, hash_blocks
from sim.profiles import Link, find_profile
from sim.worker import Request, State, StepResult, Worker, WorkerLimits

SIZE = 16
PROFILE = find_profile("llama-3.1-70b/h100/4")
_fresh_tokens = count(1_000_000, 100_000)


def make_worker(blocks: int = 1000, **limits: int) -> Worker:
    return Worker(WorkerLimits(blocks + 1, SIZE, **limits), PROFILE)


def make_request(prompt: int, output: int = 4, start: int | None = None) -> Request:
    """A request of its own, or one whose tokens count up from ``start``."""
    first = next(_fresh_tokens) if start is None else start
    chain = hash_blocks(array("I", range(first, first + prompt + output)), SIZE, "model")
    return Request(chain, prompt, output)


def run(worker: Worker, now: float = 0.0) -> tuple[float, list[StepResult]]:
    """Step until nothing is left; return the time at the end and every step's result."""
    results = []
    while worker.running or worker.waiting:
        step = worker.start(now)
        if step is None:
            wake_at = worker.wake_at()
            assert wake_at is not None
            assert wake_at > now
            now = wake_at
            continue
        now += step.duration
        results.append(worker.finish(step))
    return now, results


def serve(worker: Worker, *requests: Request, now: float = 0.0) -> float:
    for request in requests:
        worker.add(request)
    return run(worker, now)[0]


def stored(events: list[CacheEvent], tier: Tier = Tier.HBM) -> int:
    return sum(len(event.hashes) for event in events if isinstance(event, BlocksStored) and event.tier == tier)


def test_one_prompt_takes_its_ttft_and_then_itls():
    worker, request = make_worker(), make_request(prompt=1000, output=3)
    worker.add(request)
    step = worker.start(0.0)
    assert step.duration == pytest.approx(PROFILE.ttft_s(1000))
    assert worker.finish(step).emitted == [request]
    for generated in (1, 2):
        step = worker.start(0.0)
        assert step.duration == pytest.approx(PROFILE.itl_s(1, 1000 + generated))
        worker.finish(step)
    assert request.state is State.DONE
    assert worker.start(0.0) is None


def test_output_comes_one_token_per_step():
    worker, request = make_worker(), make_request(prompt=100, output=5)
    worker.add(request)
    _, results = run(worker)
    assert [result.emitted for result in results] == [[request]] * 5
    assert [result.finished for result in results] == [[], [], [], [], [request]]


def test_blocks_are_free_after_the_last_token():
    worker = make_worker(blocks=10)
    serve(worker, make_request(prompt=100, output=20))
    assert worker.cache.usage == 0


def test_a_second_turn_finds_prompt_and_answer_of_the_first():
    worker = make_worker()
    first = make_request(prompt=100, output=60, start=0)
    second = make_request(prompt=200, output=4, start=0)
    serve(worker, first)
    serve(worker, second)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 144  # 159 tokens were computed: the last one was only sampled


def test_the_last_prompt_token_is_always_computed():
    worker = make_worker()
    serve(worker, make_request(prompt=64, start=0))
    again = make_request(prompt=64, start=0)
    serve(worker, again)
    assert again.cached_tokens == 48


def test_a_cached_prefix_makes_the_first_step_shorter():
    worker = make_worker()
    serve(worker, make_request(prompt=4096, start=0))
    worker.add(make_request(prompt=4096, start=0))
    assert worker.start(0.0).duration == pytest.approx(PROFILE.ttft_s(16, cached=4080))


def test_a_prompt_beyond_the_budget_is_prefilled_in_chunks():
    worker, request = make_worker(max_batched_tokens=512), make_request(prompt=1200, output=1)
    worker.add(request)
    chunks = []
    while (step := worker.start(0.0)) is not None:
        chunks.append(request.scheduled)
        worker.finish(step)
    assert chunks == [512, 512, 176]


def test_chunks_run_beside_decodes():
    worker = make_worker(max_batched_tokens=512)
    short, long = make_request(prompt=32, output=10), make_request(prompt=1000, output=1)
    worker.add(short)
    worker.finish(worker.start(0.0))
    worker.add(long)
    step = worker.start(0.0)
    assert (short.scheduled, long.scheduled) == (1, 511)
    assert step.duration == pytest.approx(PROFILE.step_s([(511, 0)], 1, 33))


def test_no_more_requests_run_than_the_batch_takes():
    worker = make_worker(max_running=2)
    requests = [make_request(prompt=32, output=output) for output in (2, 8, 3)]
    for request in requests:
        worker.add(request)
    worker.finish(worker.start(0.0))
    assert [request.state for request in requests] == [State.RUNNING, State.RUNNING, State.WAITING]
    worker.finish(worker.start(0.0))
    worker.start(0.0)
    assert [request.state for request in requests] == [State.DONE, State.RUNNING, State.RUNNING]


def test_a_prompt_waits_until_all_of_it_fits():
    worker = make_worker(blocks=10, max_batched_tokens=16)
    first, second = make_request(prompt=96, output=2), make_request(prompt=80, output=2)
    worker.add(first)
    worker.add(second)
    _, results = run(worker)
    finished = [request for result in results for request in result.finished]
    assert finished == [first, second]
    assert second.preemptions == 0


def test_a_request_behind_one_that_does_not_fit_waits_too():
    worker = make_worker(blocks=10)
    running, large, small = (make_request(prompt=prompt, output=2) for prompt in (96, 96, 16))
    for request in (running, large, small):
        worker.add(request)
    worker.start(0.0)
    assert [request.state for request in (running, large, small)] == [State.RUNNING, State.WAITING, State.WAITING]


def test_the_newest_request_is_preempted_when_blocks_run_out():
    worker = make_worker(blocks=8)
    old, new = make_request(prompt=64, output=40), make_request(prompt=62, output=40)
    worker.add(old)
    worker.add(new)
    _, results = run(worker)
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert worker.counters.preemptions == 1
    assert [request for result in results for request in result.finished] == [old, new]
    assert (old.generated, new.generated) == (40, 40)
    assert worker.cache.usage == 0


def test_a_preempted_request_comes_back_before_those_that_wait():
    worker = make_worker(blocks=8, max_running=2)
    old, new, later = (make_request(prompt=prompt, output=40) for prompt in (64, 62, 16))
    for request in (old, new, later):
        worker.add(request)
    _, results = run(worker)
    finished = [request for result in results for request in result.finished]
    assert finished.index(new) < finished.index(later)


def test_a_preempted_request_still_reports_its_first_hit():
    worker = make_worker(blocks=8)
    worker.add(make_request(prompt=64, output=40))
    preempted = make_request(prompt=62, output=40)
    worker.add(preempted)
    run(worker)
    assert preempted.cached_tokens == 0


def test_an_aborted_request_gives_its_blocks_back_at_once():
    worker = make_worker(blocks=10)
    request = make_request(prompt=100, output=20)
    worker.add(request)
    worker.finish(worker.start(0.0))
    worker.abort(request)
    assert worker.cache.usage == 0
    assert worker.start(0.0) is None


def test_a_request_aborted_in_a_step_is_not_in_its_result():
    worker = make_worker()
    gone, stays = make_request(prompt=100), make_request(prompt=100)
    worker.add(gone)
    worker.add(stays)
    step = worker.start(0.0)
    worker.abort(gone)
    assert worker.finish(step).emitted == [stays]


def test_aborting_a_waiting_or_a_finished_request_is_fine():
    worker = make_worker(max_running=1)
    running, waiting = make_request(prompt=16, output=1), make_request(prompt=16)
    worker.add(running)
    worker.add(waiting)
    worker.finish(worker.start(0.0))
    worker.abort(running)
    worker.abort(waiting)
    worker.abort(waiting)
    assert worker.start(0.0) is None
    assert worker.cache.usage == 0


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="11 blocks does not fit a cache of 10"):
        make_worker(blocks=10).add(make_request(prompt=160, output=1))


def test_blocks_are_stored_in_the_step_that_fills_them():
    worker = make_worker(max_batched_tokens=40)
    worker.add(make_request(prompt=60, output=8))
    _, results = run(worker)
    # 40 and 20 tokens of prompt, then a token a step: the fourth output token completes the fourth block
    assert [stored(result.events) for result in results] == [2, 1, 0, 0, 0, 1, 0, 0, 0]


def test_a_hit_stores_nothing_again():
    worker = make_worker()
    serve(worker, make_request(prompt=64, output=1, start=0))
    worker.add(make_request(prompt=100, output=1, start=0))
    _, results = run(worker)
    (event,) = results[0].events
    assert len(event.hashes) == 2
    assert list(event.tokens) == list(range(64, 96))


def test_evictions_come_before_the_store_that_caused_them():
    worker = make_worker(blocks=4)
    serve(worker, make_request(prompt=62, output=1))
    worker.add(make_request(prompt=62, output=1))
    _, results = run(worker)
    assert [type(event) for event in results[0].events] == [BlockRemoved] * 3 + [BlocksStored]


def test_a_reset_is_announced_with_the_next_step():
    worker = make_worker()
    serve(worker, make_request(prompt=64, output=1))
    assert worker.reset_cache()
    worker.add(make_request(prompt=64, output=1))
    _, results = run(worker)
    assert [type(event) for event in results[0].events] == [AllCleared, BlocksStored]


def test_a_reset_is_refused_while_a_request_runs():
    worker = make_worker()
    worker.add(make_request(prompt=64, output=4))
    step = worker.start(0.0)
    assert not worker.reset_cache()
    worker.finish(step)
    assert not worker.reset_cache()


def with_host_tier() -> tuple[Worker, Request]:
    """A worker whose host tier holds the 64 tokens from 0, and whose HBM does not any more."""
    worker = make_worker(blocks=8, host_blocks=100)
    serve(worker, make_request(prompt=64, output=1, start=0))
    serve(worker, make_request(prompt=127, output=1))
    return worker, make_request(prompt=100, output=1, start=0)


def test_a_prefix_in_host_memory_is_a_hit_that_takes_time_to_reload():
    worker, request = with_host_tier()
    now = 100.0
    worker.add(request)
    assert worker.start(now) is None
    reload_s = 1e-3 + 64 * PROFILE.kv_bytes_per_token / (4 * 45e9)
    assert worker.wake_at() == pytest.approx(now + reload_s)
    step = worker.start(worker.wake_at())
    assert step.duration == pytest.approx(PROFILE.ttft_s(36, cached=64))
    assert (request.cached_tokens, request.host_tokens) == (64, 64)


def test_reloaded_blocks_are_stored_in_hbm_again():
    worker, request = with_host_tier()
    worker.add(request)
    _, results = run(worker)
    assert stored(results[0].events) == 6
    assert stored(results[0].events, Tier.HOST) == 2


def test_others_go_on_while_one_reloads():
    worker, reloading = with_host_tier()
    other = make_request(prompt=16, output=2)
    worker.add(reloading)
    worker.add(other)
    for _ in range(2):
        step = worker.start(0.0)
        assert step.requests == [other]
        assert worker.finish(step).emitted == [other]
    assert reloading.computed == 64


def test_reloads_share_the_way_from_host_memory():
    link = Link(bytes_per_s=1e9, latency_s=0.0)
    worker = Worker(WorkerLimits(9, SIZE, host_blocks=100), PROFILE, link)
    serve(worker, make_request(prompt=32, output=1, start=0), make_request(prompt=32, output=1, start=5000))
    serve(worker, make_request(prompt=127, output=1))
    requests = [make_request(prompt=40, output=1, start=start) for start in (0, 5000)]
    for request in requests:
        worker.add(request)
    now = 50.0
    worker.start(now)
    one = 32 * PROFILE.kv_bytes_per_token / 1e9
    assert [request.ready_at - now for request in requests] == pytest.approx([one, 2 * one])


def test_a_request_can_be_aborted_while_it_reloads():
    worker, request = with_host_tier()
    worker.add(request)
    worker.start(0.0)
    worker.abort(request)
    assert worker.cache.usage == 0
    assert worker.wake_at() is None


def test_lookups_are_counted_as_tokens_and_once_per_request():
    worker, request = with_host_tier()
    before = worker.counters.prefix_queries
    serve(worker, request)
    assert worker.counters.prefix_queries - before == 100
    assert worker.counters.prefix_hits == 0
    assert worker.counters.host_hits == 64
