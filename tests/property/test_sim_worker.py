"""Whatever comes, the scheduler keeps within its limits and finishes everything."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sim.cache import hash_blocks
from sim.profiles import find_profile
from sim.worker import Request, State, Worker, WorkerLimits

SIZE = 4
BLOCKS = 24
LIMITS = WorkerLimits(BLOCKS + 1, SIZE, host_blocks=30, max_batched_tokens=16, max_running=4)

# prompt and output tokens, which of three prefixes, step of arrival, steps until the client leaves (0: it stays)
requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)),
    min_size=1,
    max_size=12,
)


def make_request(prompt: int, output: int, prefix: int) -> Request:
    tokens = array("I", range(prefix * 1000, prefix * 1000 + prompt + output))
    return Request(hash_blocks(tokens, SIZE, "model"), prompt, output)


@given(requests)
def test_every_request_is_served_within_the_limits(drawn):
    worker = Worker(LIMITS, find_profile("llama-3.1-8b/h100/1"))
    arrivals = [(at, make_request(*numbers), stays) for *numbers, at, stays in drawn]
    emitted: dict[Request, int] = {request: 0 for _, request, _ in arrivals}
    now, steps = 0.0, 0
    while steps <= 30 or worker.waiting or worker.running:
        for at, request, stays in arrivals:
            if at == steps:
                worker.add(request)
            if stays and at + stays == steps:
                worker.abort(request)
        steps += 1
        assert steps < 2000
        step = worker.start(now)
        if step is None:
            now = max(now, worker.wake_at() or 0.0)
            continue
        assert len(worker.running) <= LIMITS.max_running
        assert sum(request.scheduled for request in step.requests) <= LIMITS.max_batched_tokens
        assert all(len(request.blocks) * SIZE >= request.computed + request.scheduled for request in step.requests)
        assert step.duration > 0
        now += step.duration
        for request in worker.finish(step).emitted:
            emitted[request] += 1
    for _, request, stays in arrivals:
        assert request.state is State.DONE
        assert emitted[request] == request.generated
        assert stays or request.generated == request.output_tokens
    assert worker.cache.usage == 0
    assert worker.reset_cache()
