"""OpenTelemetry traces: one span per request, made from its record when it is over.

At a request's beginning only its place in the trace is chosen and written into ``traceparent``, so that the spans of
the engine become children of ours. Importing this needs the extra ``otel``.
"""

from __future__ import annotations

import asyncio
import re
from random import getrandbits
from threading import Thread
from time import time_ns
from typing import Final
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway import __version__
from gateway.config import Config
from gateway.errors import ConfigError
from gateway.observe.record import Outcome, RequestRecord, TraceContext

_FLUSH_S: Final = 5.0

_LINES: Final = re.compile(rb"^trace(parent|state): ([^\r]*)\r\n", re.MULTILINE)
_PARENT_LINE: Final = re.compile(rb"^traceparent: [^\r]*\r\n", re.MULTILINE)
# W3C Trace Context: a version to come may append fields, version 00 has none, ff is no version, 0 is no id.
_PARENT: Final = re.compile(
    rb"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SAMPLED: Final = 0x01
_KNOWN_FLAGS: Final = 0x03  # sampled, and random-trace-id; others must not pass on

_METHODS: Final = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""``gen_ai.operation.name`` of the paths that spans are named by; of others any number may be made up."""


class Tracing:
    """Chooses the place of requests in their traces, and sends their spans to a collector, from a thread.

    The SDK's own settings are read from the environment (``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_…``).

    Args:
        config: its ``tracing.endpoint`` is set.

    Raises:
        ConfigError: a variable of the environment is of no use to the SDK.
    """

    def __init__(self, config: Config) -> None:
        self._bound = round(config.tracing.sample_ratio * 2**64)
        self._scheme = "http" if config.server.tls_cert is None else "https"
        self._flush_s = min(_FLUSH_S, config.server.drain_s)
        self._scope = InstrumentationScope("kvway", __version__)
        us = {"service.name": "kvway", "service.version": __version__, "service.instance.id": str(uuid4())}
        self._resource = Resource.create(us).merge(OTELResourceDetector().detect())
        try:
            self._processor = BatchSpanProcessor(OTLPSpanExporter(config.tracing.endpoint))
        except ValueError as error:
            raise ConfigError(f"tracing: the environment sets OTEL_… to what cannot be used: {error}") from None

    def begin(self, method: bytes, fields: bytes) -> tuple[bytes, TraceContext | None]:
        """Choose a request's place in its trace.

        Args:
            method: as the client wrote it.
            fields: the header lines for the worker, names in lower case, each with its CRLF.

        Returns:
            These lines with the ``traceparent`` that the worker is to go on from, and the place; None where the request
            is not sampled, nor are then the worker's spans.
        """
        lines = _LINES.findall(fields)
        parents = [value for name, value in lines if name == b"parent"]
        parent = _PARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
        if parent is not None:
            trace_id, parent_id = int(parent[1], 16), int(parent[2], 16)
            flags = int(parent[3], 16) & _KNOWN_FLAGS
            if not flags & _SAMPLED:
                return fields, None
            fields = _PARENT_LINE.sub(b"", fields)
        else:
            trace_id, parent_id = _new_id(128), 0
            flags = _SAMPLED if trace_id % 2**64 < self._bound else 0  # as the SDK's TraceIdRatioBased
            fields = _LINES.sub(b"", fields)  # a state without a trace means nothing
        span_id = _new_id(64)
        fields = b"traceparent: 00-%032x-%016x-%02x\r\n%b" % (trace_id, span_id, flags, fields)
        if not flags:
            return fields, None
        return fields, TraceContext(method.decode("ascii"), trace_id, span_id, parent_id, flags)

    def finish(self, record: RequestRecord) -> None:
        """Hand over the span of a request that is over, if one is wanted; it is dropped where too many wait."""
        trace = record.trace
        if trace is None:
            return
        flags, now_ns = TraceFlags(trace.flags), time_ns()
        # The SDK's start_span and end take eight times as long, and on the event loop.
        span = ReadableSpan(
            _name(record, trace),
            SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=flags),
            SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags)
            if trace.parent_id
            else None,
            self._resource,
            _attributes(record, trace, self._scheme),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if _error(record) else StatusCode.UNSET),
            start_time=now_ns - round((record.ended_at - record.received_at) * 1e9),
            end_time=now_ns,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    async def close(self) -> None:
        """Send what is waiting, for a few seconds at most (and no longer than ``server.drain_s``)."""
        flush = Thread(target=self._processor.shutdown, name="flush spans", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, self._flush_s)


def _new_id(bits: int) -> int:
    return getrandbits(bits) or 1  # 0 is no id


def _name(record: RequestRecord, trace: TraceContext) -> str:
    method = trace.method if trace.method in _METHODS else "HTTP"
    return f"{method} {record.path}" if record.path in _OPERATIONS else method


def _error(record: RequestRecord) -> str | None:
    """Return ``error.type``; None for what is no fault of the server: answers below 500, and clients that left."""
    if record.outcome in (Outcome.UPSTREAM_FAILED, Outcome.CUT):
        return record.reason
    if record.status < 500:
        return None
    return record.reason if record.outcome is Outcome.REJECTED else str(record.status)


def _attributes(record: RequestRecord, trace: TraceContext, scheme: str) -> dict[str, str | int | float]:
    """Return what the span says, by the semantic conventions for HTTP and for generative AI where they have a name."""
    began_at = record.received_at
    streams = record.stream and record.first_byte_at
    values = {
        "http.request.method": trace.method if trace.method in _METHODS else "_OTHER",
        "http.route": record.path if record.path in _OPERATIONS else None,
        "http.response.status_code": record.status or None,
        "url.scheme": scheme,
        "url.path": record.shown_path,
        "error.type": _error(record),
        "gen_ai.operation.name": _OPERATIONS.get(record.path),
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.stream": record.stream or None,
        "gen_ai.response.time_to_first_chunk": record.first_byte_at - began_at if streams else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens or None,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "kvway.request_id": record.request_id,
        "kvway.outcome": record.outcome.value,
        "kvway.reason": record.reason or None,
        "kvway.worker": record.worker or None,
        "kvway.attempts": record.attempts,
        "kvway.resumptions": record.resumptions or None,
        "kvway.predicted_hit_tokens": record.predicted_hit_tokens if record.prompt_tokens else None,
        "kvway.decision_seconds": record.routed_at - began_at if record.routed_at else None,
    }
    return {name: value for name, value in values.items() if value is not None}
