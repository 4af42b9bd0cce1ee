"""A request's place in its trace: what is chosen at its beginning, and what its worker is told."""

from __future__ import annotations

import re
import sys

import pytest

from gateway.app import Gateway
from gateway.config import Config
from gateway.errors import ConfigError
from gateway.observe.record import TraceContext
from gateway.observe.tracing import Tracing

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
GIVEN = f"00-{TRACE:032x}-{SPAN:016x}"


@pytest.fixture
def tracing() -> Tracing:
    return make()


def make(sample_ratio: float = 1.0) -> Tracing:
    section = {"endpoint": "http://127.0.0.1:1", "sample_ratio": sample_ratio}
    return Tracing(Config.model_validate({"tracing": section}))


def begin(tracing: Tracing, *lines: str) -> tuple[bytes, TraceContext | None]:
    return tracing.begin(b"POST", joined(*lines))


def joined(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode()


def told(fields: bytes) -> tuple[int, int, int]:
    """Return trace, span and flags that a worker reads; there is one ``traceparent``."""
    [line] = re.findall(rb"^traceparent: ([^\r]*)\r\n", fields, re.MULTILINE)
    found = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", line.decode())
    assert found, line
    return int(found[1], 16), int(found[2], 16), int(found[3], 16)


def test_a_request_of_no_trace_begins_one_and_the_worker_continues_it(tracing: Tracing) -> None:
    first, trace = begin(tracing, "accept: */*")
    _, other = begin(tracing)
    assert trace is not None and other is not None
    assert told(first) == (trace.trace_id, trace.span_id, 1)
    assert (trace.method, trace.parent_id) == ("POST", 0)
    assert first.endswith(b"\r\naccept: */*\r\n")
    assert len({trace.trace_id, trace.span_id, other.trace_id, other.span_id}) == 4


def test_a_request_of_a_trace_goes_on_in_it_below_the_clients_span(tracing: Tracing) -> None:
    fields, trace = begin(tracing, "accept: */*", f"traceparent: {GIVEN}-01", "tracestate: a=1,b=2", "x-tag: a")
    assert trace is not None
    assert (trace.trace_id, trace.parent_id) == (TRACE, SPAN)
    assert told(fields) == (TRACE, trace.span_id, 1)
    assert trace.span_id != SPAN
    assert fields.endswith(b"-01\r\naccept: */*\r\ntracestate: a=1,b=2\r\nx-tag: a\r\n")


def test_of_the_flags_those_that_are_known_pass_on(tracing: Tracing) -> None:
    fields, _ = begin(tracing, f"traceparent: {GIVEN}-ff")
    assert told(fields)[2] == 3


@pytest.mark.parametrize("flags", ["00", "02"])
def test_what_the_client_does_not_sample_stays_unsampled_and_untouched(tracing: Tracing, flags: str) -> None:
    lines = f"traceparent: {GIVEN}-{flags}", "tracestate: a=1"
    assert begin(tracing, *lines) == (joined(*lines), None)


def test_a_later_version_is_read_as_far_as_it_is_known(tracing: Tracing) -> None:
    fields, trace = begin(tracing, f"traceparent: 01-{GIVEN[3:]}-01-more")
    assert trace is not None
    assert told(fields) == (TRACE, trace.span_id, 1)


@pytest.mark.parametrize(
    "lines",
    [
        ["traceparent: 00-1-2-01"],
        ["traceparent: "],
        [f"traceparent: {GIVEN}-01-more"],
        [f"traceparent: {GIVEN}-01."],
        [f"traceparent: {GIVEN.upper()}-01"],
        [f"traceparent: ff{GIVEN[2:]}-01"],
        [f"traceparent: 00-{0:032x}-{SPAN:016x}-01"],
        [f"traceparent: 00-{TRACE:032x}-{0:016x}-01"],
        [f"traceparent: {GIVEN}-01"] * 2,
        [],
    ],
)
def test_what_is_no_trace_is_replaced_with_its_state(tracing: Tracing, lines: list[str]) -> None:
    fields, trace = begin(tracing, *lines, "tracestate: a=1", "x-traceparent: kept")
    assert trace is not None
    assert trace.parent_id == 0
    assert trace.trace_id != TRACE
    assert told(fields) == (trace.trace_id, trace.span_id, 1)
    assert fields.endswith(b"-01\r\nx-traceparent: kept\r\n")


def test_the_ratio_is_of_new_traces_and_their_workers_follow_it() -> None:
    quarter, none = make(sample_ratio=0.25), make(sample_ratio=0)
    begun = [begin(quarter) for _ in range(2000)]
    sampled = [trace is not None for _, trace in begun]
    assert [told(fields)[2] == 1 for fields, _ in begun] == sampled
    assert 380 < sum(sampled) < 620  # six standard deviations
    assert all(begin(none)[1] is None for _ in range(100))
    for tracing in (quarter, none):
        assert begin(tracing, f"traceparent: {GIVEN}-01")[1] is not None


def test_an_environment_that_cannot_be_used_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "-1")
    with pytest.raises(ConfigError, match=r"tracing: .*OTEL_.*schedule_delay"):
        make()


def test_without_the_extra_the_start_ends_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.observe.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvway\[otel\]'"):
        Gateway(Config.model_validate({"tracing": {"endpoint": "http://127.0.0.1:4318"}}))
