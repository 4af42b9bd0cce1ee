"""What is kept of a load test, and what the load generator knows about itself."""

from __future__ import annotations

import time
from typing import Any

import gevent
import numpy as np
import pytest

from sim.load.health import MOST_CPU, MOST_LAG_S, ClientWatch, Window
from sim.load.recorder import Recorder, client_summary
from sim.load.report import figures, remarks
from sim.load.stream import ANSWER, Answer, read_answer

BEGAN = 100.0


def answer(sent: float = BEGAN, ttft_s: float = 0.5, gaps_s: tuple[float, ...] = (), **fields: Any) -> Answer:
    ended = sent + ttft_s + sum(gaps_s)
    return Answer(sent, first=sent + ttft_s, ended=ended, gaps_s=list(gaps_s), complete=True, **fields)


def recorded(*answers: Answer, failed: tuple[str, ...] = ()) -> Recorder:
    recorder = Recorder(BEGAN)
    for each in answers:
        recorder.on_request(context={ANSWER: each}, exception=None, name="x")
    for message in failed:
        recorder.on_request(context={ANSWER: Answer(BEGAN, ended=BEGAN + 1)}, exception=OSError(message))
    return recorder


def test_figures_are_of_answered_requests() -> None:
    one = answer(ttft_s=0.2, prompt_tokens=100, cached_tokens=50, output_tokens=10)
    other = answer(sent=BEGAN + 3, ttft_s=1.0, prompt_tokens=300, cached_tokens=None, output_tokens=30)
    found = recorded(one, other, failed=("gone",)).summary()
    assert (found["requests"], found["answered"], found["failed"]) == (3, 2, 1)
    assert found["seconds"] == pytest.approx(4.0)
    assert found["output_tokens_per_s"] == pytest.approx(10.0)
    assert found["hit_rate"] == pytest.approx(50 / 400)  # vLLM names no details where nothing was cached
    assert found["ttft_p50_s"] == pytest.approx(0.6)
    assert found["errors"] == {"gone": 1}


def test_what_was_not_measured_is_not_zero() -> None:
    found = recorded(answer(prompt_tokens=10)).summary()
    assert (found["hit_rate"], found["itl_p50_s"]) == (None, None)
    assert recorded().summary()["ttft_p99_s"] is None
    shown = dict(figures({**found, "scenario": "x"}))
    assert shown["hit rate"] == shown["ITL p50, ms"] == shown["output tokens/s"] == "not reported"


def test_tokens_per_second_need_a_usage_and_more_than_one_chunk() -> None:
    assert answer(gaps_s=(0.1, 0.3), output_tokens=9).tokens_per_s == pytest.approx(20.0)
    assert answer(gaps_s=(0.1, 0.3)).tokens_per_s is None
    assert answer(output_tokens=9).tokens_per_s is None


def test_quantiles_of_gaps_are_true_to_one_percent() -> None:
    gaps = np.random.default_rng(0).lognormal(-4, 1, 5_000)
    recorder = recorded(*(answer(gaps_s=tuple(part)) for part in np.split(gaps, 50)))
    shares = np.array([0.5, 0.9, 0.99])
    assert recorder.gap_quantiles(shares) == pytest.approx(np.quantile(gaps, shares), rel=0.012)


def test_gaps_of_nothing_and_of_hours_are_counted() -> None:
    recorder = recorded(answer(gaps_s=(0.0, 0.0, 0.0, 7200.0)), answer(gaps_s=()))
    least, most = recorder.gap_quantiles(np.array([0.5, 1.0]))
    assert least == pytest.approx(1e-5, rel=0.01) and most > 1000
    assert recorder.answered == 2


def test_kinds_of_failures_are_bounded() -> None:
    recorder = recorded(failed=tuple(f"failure {number}" for number in range(500)))
    assert len(recorder.errors) <= 51
    assert sum(recorder.errors.values()) == 500


def test_metrics_of_a_request_are_not_requests() -> None:
    recorder = Recorder(BEGAN)
    recorder.on_request(context={}, exception=None)
    assert recorder.summary()["requests"] == 0


@pytest.mark.parametrize(
    ("cpu", "lag_s", "saturated"), [(0.5, 0.001, False), (MOST_CPU + 0.01, 0.0, True), (0.1, MOST_LAG_S * 2, True)]
)
def test_a_client_without_cpu_or_late_is_saturated_and_the_result_says_so(
    cpu: float, lag_s: float, saturated: bool
) -> None:
    client = client_summary([Window(BEGAN, cpu, lag_s, 1)])
    assert client["saturated_s"] == int(saturated)
    found = recorded(answer()).summary() | {"client": client}
    assert any("saturated" in remark for remark in remarks(found)) == saturated


@pytest.mark.parametrize(("saturated", "remarked"), [({}, 0), ({"saturated": True}, 0), ({"saturated": False}, 1)])
def test_a_ramp_that_does_not_saturate_the_endpoint_is_remarked(saturated: dict[str, bool], remarked: int) -> None:
    found = remarks({**recorded(answer()).summary(), "client": client_summary([]), **saturated})
    assert len([each for each in found if "before the endpoint was saturated" in each]) == remarked


def test_requests_that_went_out_late_are_remarked() -> None:
    found = recorded(answer(late_s=2.0)).summary() | {"client": client_summary([])}
    assert "more users" in remarks(found)[0]


def test_a_blocked_event_loop_is_noticed() -> None:
    watch = ClientWatch(lambda: 3)
    gevent.sleep(0.05)
    time.sleep(0.3)
    while not watch.windows:
        gevent.sleep(0.05)
    watch.stop()
    assert watch.windows[0].lag_s > 0.2
    assert watch.windows[0].saturated
    assert watch.windows[0].users == 3


def read(*lines: bytes) -> Answer:
    read_from, clock = iter([*lines, b""]), iter(np.arange(1.0, 100.0))
    found = Answer(0.0)
    read_answer(read_from.__next__, found, clock.__next__)
    return found


@pytest.mark.parametrize(
    "first",
    [
        b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"reasoning_content":"a"}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}',
    ],
)
def test_text_reasoning_and_tool_calls_are_first_tokens_and_roles_are_not(first: bytes) -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n'
    found = read(
        role, b"\n", b": comment\n", b"data: " + first + b"\n", b"\n", b"data:" + first + b"\r\n", b"data: [DONE]\n"
    )
    assert (found.first, found.gaps_s, found.complete) == (2.0, [1.0], True)


@pytest.mark.parametrize("none", [b"[]", b"null"])
def test_the_usage_may_come_without_choices(none: bytes) -> None:
    found = read(b'data: {"choices":%b,"usage":{"prompt_tokens":7,"completion_tokens":2}}\n' % none)
    assert (found.prompt_tokens, found.output_tokens, found.first) == (7, 2, None)


def test_an_event_that_is_no_chunk_is_an_error() -> None:
    with pytest.raises(ValueError, match="no chunk of the OpenAI API"):
        read(b"data: <html>\n")
