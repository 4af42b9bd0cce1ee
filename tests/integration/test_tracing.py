"""Spans of requests: a real collector's protocol at one end, fake workers at the other, a gateway between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway import __version__
from gateway.app import Gateway
from gateway.config import Config
from gateway.observe.record import Outcome, RequestRecord
from gateway.observe.tracing import Tracing
from tests.gateway_rig import ready
from tests.integration.test_disaggregation_legs import PREFILLED, ROLES
from tests.pd_rig import ALWAYS, body_of
from tests.peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Script,
    Wire,
    answer,
    chunk,
    connect,
    eventually,
    request,
    response,
)

MODEL = "m"
SECRET = "the-words-of-the-user"
CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": SECRET}]})
STREAMED = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "stream": True})
USAGE = {"prompt_tokens": 40, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

Attributes = dict[str, Any]


class Collector(FakeWorker):
    """Takes spans over OTLP/HTTP."""

    def __init__(self) -> None:
        super().__init__(answer(response(b"", content_type="application/x-protobuf")))

    @property
    def exports(self) -> list[ExportTraceServiceRequest]:
        assert {each.target for each in self.requests} <= {"/v1/traces"}
        return [ExportTraceServiceRequest.FromString(each.body) for each in self.requests]

    @property
    def spans(self) -> list[Span]:
        scopes = (scope for each in self.exports for found in each.resource_spans for scope in found.scope_spans)
        return [span for scope in scopes for span in scope.spans]


@pytest.fixture(autouse=True)
def sent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


def attributes(of: Any) -> Attributes:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def engine(script: Script) -> FakeWorker:
    """A worker that follows ``script`` for requests, and is healthy."""

    async def answered(wire: Wire, asked: Message) -> None:
        if asked.method == "POST":
            await script(wire, asked)
        else:
            wire.send(response())

    return FakeWorker(answered)


@contextlib.asynccontextmanager
async def traced(
    endpoint: str | None, *workers: FakeWorker, sample_ratio: float = 1.0, settings: Sequence[Any] = (), **sections: Any
) -> AsyncIterator[Gateway]:
    """A gateway before ``workers`` (with ``settings`` of each), ready to serve, with spans to ``endpoint``."""
    entries = [{"url": each.url, "name": f"w{n}", "models": [MODEL]} for n, each in enumerate(workers)]
    config = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_s": 1},
        "workers": [entry | more for entry, more in zip_longest(entries, settings, fillvalue={})],
        "policy": {"name": "round-robin"},
        "prompt": {"chunk_tokens": 16},
        "log": {"requests": False, "level": "error"},
        "tracing": {"endpoint": endpoint, "sample_ratio": sample_ratio},
    }
    async with Gateway(Config.model_validate(config | sections)) as gateway:
        await eventually(lambda: len(ready(gateway)) == len(workers))
        yield gateway


async def ask(gateway: Gateway, body: bytes = CHAT, **options: Any) -> Message:
    async with connect(gateway.port) as client:
        client.send(request(body, **options))
        return await client.read_message()


def traceparents(*workers: FakeWorker) -> list[str]:
    """Return what those that were asked something were told, in order."""
    return [each.headers["traceparent"] for worker in workers for each in worker.requests if each.method == "POST"]


async def test_a_request_is_a_span_below_the_clients_and_above_the_engines() -> None:
    usage = msgspec.json.encode({"choices": [], "usage": USAGE})
    before = time.time_ns()
    async with Collector() as collector, engine(answer(response(usage))) as worker:
        async with traced(collector.url, worker) as gateway:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1", "X-Request-Id": "r-1"}
            await ask(gateway, path="/v1/chat/completions?api_key=k-123", headers=headers)
            await eventually(lambda: bool(collector.spans))
        [span], [export] = collector.spans, collector.exports
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
        assert traceparents(worker) == [f"00-{TRACE}-{span.span_id.hex()}-01"]
        assert next(each for each in worker.requests if each.method == "POST").headers["tracestate"] == "a=1"
        assert (span.name, span.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
        assert span.status.code == Status.STATUS_CODE_UNSET
        assert before < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
        found = attributes(span)
        assert 0 < found.pop("kvway.decision_seconds") < (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert found.pop("gen_ai.usage.input_tokens") > 0
        assert found == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "url.scheme": "http",
            "url.path": "/v1/chat/completions",
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.output_tokens": 7,
            "gen_ai.usage.cache_read.input_tokens": 16,
            "kvway.request_id": "r-1",
            "kvway.outcome": "ok",
            "kvway.reason": "turn",
            "kvway.worker": "w0",
            "kvway.attempts": 1,
            "kvway.predicted_hit_tokens": 0,
        }
        resource = attributes(export.resource_spans[0].resource)
        assert (resource["service.name"], resource["service.version"]) == ("kvway", __version__)
        assert resource["service.instance.id"]
        raw = b"".join(each.body for each in collector.requests)
        assert SECRET.encode() not in raw
        assert b"k-123" not in raw


async def test_all_attempts_of_a_request_are_below_one_span() -> None:
    refusing = engine(answer(response(b"{}", "503 Busy")))
    async with Collector() as collector, refusing, engine(answer(response())) as worker:
        async with traced(collector.url, refusing, worker) as gateway:
            for _ in range(2):  # one of them begins at the worker that refuses
                await ask(gateway)
            await eventually(lambda: len(collector.spans) == 2)
        told = traceparents(refusing, worker)
        assert sorted({parent[36:52] for parent in told}) == sorted(span.span_id.hex() for span in collector.spans)
        assert len({span.trace_id for span in collector.spans}) == 2
        assert sorted(attributes(span)["kvway.attempts"] for span in collector.spans) == [1, 2]
        assert len(told) == 3


async def test_both_legs_of_a_request_over_two_workers_are_below_its_span() -> None:
    async with Collector() as collector, engine(answer(PREFILLED)) as prefill, engine(answer(response())) as decode:
        async with traced(collector.url, prefill, decode, settings=ROLES, disaggregation=ALWAYS) as gateway:
            await ask(gateway, body_of("/v1/chat/completions"))
            await eventually(lambda: bool(collector.spans))
        [span] = collector.spans
        assert traceparents(prefill, decode) == [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"] * 2


async def test_a_stream_says_when_its_first_byte_came_and_one_that_is_cut_is_an_error() -> None:
    async def stream(wire: Wire, asked: Message) -> None:
        wire.send(STREAM_HEAD, chunk(b"data: {}\n\n"))
        await wire.writer.drain()
        if "x-cut" in asked.headers:
            wire.reset()
        else:
            wire.send(chunk(DONE), LAST_CHUNK)

    async with Collector() as collector, engine(stream) as worker:
        async with traced(collector.url, worker) as gateway:
            await ask(gateway, STREAMED)
            await eventually(lambda: len(collector.spans) == 1)
            await ask(gateway, STREAMED, headers={"x-cut": "1"})
            await eventually(lambda: len(collector.spans) == 2)
        whole, cut = collector.spans
        assert whole.status.code == Status.STATUS_CODE_UNSET
        assert attributes(whole)["gen_ai.request.stream"] is True
        assert attributes(whole)["gen_ai.response.time_to_first_chunk"] > 0
        assert cut.status.code == Status.STATUS_CODE_ERROR
        found = attributes(cut)
        assert (found["kvway.outcome"], found["error.type"], found["http.response.status_code"]) == (
            "cut", "upstream_failed", 200
        )  # fmt: skip


async def test_what_the_gateway_answers_itself_is_a_span_too() -> None:
    async with Collector() as collector, traced(collector.url) as gateway:
        refused = await ask(gateway)
        await eventually(lambda: len(collector.spans) == 1)
        async with connect(gateway.port) as client:
            client.send(b"nonsense\r\n\r\n")
            assert (await client.read_message()).status == 400
        await eventually(lambda: len(collector.spans) == 2)
        first, second = collector.spans
        found = attributes(first)
        assert (first.status.code, refused.status) == (Status.STATUS_CODE_ERROR, 503)
        assert (found["http.response.status_code"], found["error.type"]) == (503, "no_worker")
        assert second.name == "HTTP"
        assert second.status.code == Status.STATUS_CODE_UNSET
        assert attributes(second)["http.request.method"] == "_OTHER"


async def test_what_is_not_sampled_is_no_span_and_the_worker_is_told() -> None:
    async with Collector() as collector, engine(answer(response())) as worker:
        async with traced(collector.url, worker, sample_ratio=0) as gateway:
            await ask(gateway)
            await ask(gateway, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
            await ask(gateway, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        new, unsampled, sampled = traceparents(worker)
        assert new.endswith("-00")
        assert unsampled == f"00-{TRACE}-{SPAN}-00"
        [span] = collector.spans
        assert sampled == f"00-{TRACE}-{span.span_id.hex()}-01"


async def test_without_an_endpoint_a_traceparent_passes_as_it_is() -> None:
    async with engine(answer(response())) as worker, traced(None, worker) as gateway:
        await ask(gateway, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert traceparents(worker) == [f"00-{TRACE}-{SPAN}-01"]


async def test_spans_that_wait_are_sent_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    async with Collector() as collector, engine(answer(response())) as worker:
        async with traced(collector.url, worker) as gateway:
            await ask(gateway)
            assert not collector.requests
        [export], [sent] = collector.exports, collector.requests
        assert sent.headers["authorization"] == "Bearer t"
        assert attributes(export.resource_spans[0].resource)["service.name"] == "edge"


@pytest.mark.parametrize("listens", [True, False])
async def test_a_collector_that_does_not_answer_holds_up_neither_requests_nor_the_end(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_: Wire, __: Message) -> None: ...

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    async with FakeWorker(silent) as collector, engine(answer(response())) as worker:
        if not listens:
            collector.kill()
        async with asyncio.timeout(20), traced(collector.url, worker) as gateway:  # server.drain_s is 1
            await ask(gateway)
            if listens:
                await eventually(lambda: bool(collector.requests))
            assert [(await ask(gateway)).status for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    ("fields", "name", "error"),
    [
        ({"outcome": Outcome.UPSTREAM_FAILED, "status": 502, "reason": "upstream_failed"}, "", "upstream_failed"),
        ({"status": 500}, "", "500"),
        ({"status": 404}, "", None),
        ({"outcome": Outcome.REJECTED, "status": 429, "reason": "queue_full"}, "", None),
        ({"outcome": Outcome.CLIENT_GONE, "status": 0}, "", None),
        ({"path": "/v1/embeddings"}, " /v1/embeddings", None),
        ({"path": "/v1/made/up?key=" + "x" * 1000}, "", None),
    ],
)
async def test_spans_are_errors_where_the_server_failed_and_named_by_paths_that_are_known(
    fields: dict[str, Any], name: str, error: str | None
) -> None:
    async with Collector() as collector:
        tracing = Tracing(Config.model_validate({"tracing": {"endpoint": collector.url}}))
        record = RequestRecord("r-1", "/v1/files", 1.0, ended_at=3.5, status=200)
        for field, value in fields.items():
            setattr(record, field, value)
        tracing.finish(record)  # of which no span is wanted
        _, record.trace = tracing.begin(b"POST", b"")
        tracing.finish(record)
        await tracing.close()
        [span] = collector.spans
        found = attributes(span)
        assert span.end_time_unix_nano - span.start_time_unix_nano == 2_500_000_000
        assert span.name == f"POST{name}"
        assert (span.status.code == Status.STATUS_CODE_ERROR, found.get("error.type")) == (error is not None, error)
        assert found["url.path"] == record.path.partition("?")[0]
        assert found.get("http.response.status_code", 0) == record.status
