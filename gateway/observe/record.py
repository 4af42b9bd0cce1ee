"""What is written down about one request; the exchange fills it in, metrics and logs read it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from policies.base import RoutingRequest

_MAX_PATH: Final = 256


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"  # the worker's answer reached the client whole, whatever its status
    REJECTED = "rejected"  # answered by the gateway itself: bad request, no worker, saturated
    CLIENT_GONE = "client_gone"
    UPSTREAM_FAILED = "upstream_failed"  # no worker answered before the first byte
    CUT = "cut"  # the worker died after the first byte


class TraceContext(msgspec.Struct):
    """Where a request that is traced stands in its trace, in the terms of W3C Trace Context.

    Attributes:
        method: of the request.
        trace_id: the client's, else a new one.
        span_id: of the request's own span.
        parent_id: the client's span, 0 where it named none.
        flags: as they pass on, ``sampled`` among them.
    """

    method: str
    trace_id: int
    span_id: int
    parent_id: int
    flags: int


class RequestRecord(msgspec.Struct):
    """One request's life. Times are monotonic seconds, 0 where the moment did not come."""

    request_id: str
    path: str
    received_at: float
    model: str = ""  # a name some worker serves, or empty: never what a client made up
    worker: str = ""
    stream: bool = False
    status: int = 0
    outcome: Outcome = Outcome.OK
    reason: str = ""  # the decision's reason, or the error's code
    attempts: int = 0
    resumptions: int = 0  # how often its stream went on elsewhere after its worker had died
    prompt_tokens: int = 0
    request: RoutingRequest | None = None  # what the policy saw, None where there was no prompt to read
    predicted_hit_tokens: int = 0
    cached_tokens: int | None = None  # as the engine reported it in usage, None where it did not
    output_tokens: int | None = None
    routed_at: float = 0.0  # first decided about, whatever became of that
    first_byte_at: float = 0.0
    ended_at: float = 0.0
    trace: TraceContext | None = None  # None where no span is wanted of it

    @property
    def shown_path(self) -> str:
        """The path as it may be written down: a query may hold a key, and a client make up any length."""
        return self.path.partition("?")[0][:_MAX_PATH]
