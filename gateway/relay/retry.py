"""When a request that got no answer is sent to another worker, and when it is not.

Only requests of which the client has not seen a byte are sent again. Of those, requests that a worker may have begun
to act on are sent again only where acting twice does no harm: inference. A budget keeps retries from multiplying the
load of a fleet that is failing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import random
from typing import Final

from gateway.config import RetryConfig
from gateway.errors import Unreachable, UpstreamError, UpstreamTimeout
from gateway.relay.head import ResponseHead

REFUSED_STATUSES: Final = frozenset({429, 503})
RETRYABLE_STATUSES: Final = REFUSED_STATUSES | {502, 504}

_BURST_S: Final = 10.0
"""Unused budget is kept for this long: the window in which requests count as recent."""

_REPEATABLE_METHODS: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_REPEATABLE_PATHS: Final = frozenset(
    {
        "/classify",
        "/detokenize",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/classify",
        "/v1/completions",
        "/v1/detokenize",
        "/v1/embeddings",
        "/v1/images/generations",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/moderations",
        "/v1/pooling",
        "/v1/rerank",
        "/v1/score",
        "/v1/tokenize",
        "/v2/rerank",
    }
)


def is_repeatable(method: bytes, path: str) -> bool:
    """Return whether a request may run twice without harm: reads, and inference, which leaves nothing behind."""
    return method in _REPEATABLE_METHODS or path in _REPEATABLE_PATHS


class FailureKind(StrEnum):
    """Why an attempt brought no answer that the client could be given."""

    CONNECT = "connect"  # no connection; nothing was sent
    EXHAUSTED = "exhausted"  # no connection, as the gateway itself is out of descriptors, ports or memory
    STALE = "stale"  # a pooled connection turned out to be closed as we sent
    RESET = "reset"  # the connection ended before the response did
    TIMEOUT = "header_timeout"  # no first byte
    IDLE = "idle_timeout"  # no next one
    MALFORMED = "malformed"  # the worker does not speak HTTP
    PARTNER = "other_leg"  # prefill and decode are apart, and the prefill worker failed
    NO_KV = "no_kv"  # a decode worker could not load what was handed over, through whose fault ever
    REFUSED = "refused"  # 429, 503: the worker is at its limit, and well
    BROKEN = "bad_status"  # 502, 504

    @property
    def blames_worker(self) -> bool:
        """Whether this counts against the worker's health."""
        return self not in _BLAMELESS


_BLAMELESS: Final = frozenset(
    {FailureKind.EXHAUSTED, FailureKind.STALE, FailureKind.PARTNER, FailureKind.NO_KV, FailureKind.REFUSED}
)


@dataclass(slots=True)
class Failure:
    """One attempt that failed.

    Attributes:
        kind: why.
        detail: the same for people, to follow "worker <name> ".
        retry_after_s: how long the worker wants to be left alone.
    """

    kind: FailureKind
    detail: str
    retry_after_s: float = 0.0


def refused_by(head: ResponseHead) -> Failure:
    """Return what a response says that brings no answer."""
    well = head.status < 500 or head.status in REFUSED_STATUSES
    kind = FailureKind.REFUSED if well else FailureKind.BROKEN
    return Failure(kind, f"answered {head.status}", head.retry_after_s)


def no_answer(failure: Failure, worker: str, attempts: int) -> UpstreamError:
    """Return what the client is told when the last attempt has failed, and none left an answer to pass on."""
    message = f"Worker {worker} {failure.detail}; attempts made: {attempts}."
    if failure.kind is FailureKind.TIMEOUT:
        return UpstreamTimeout(message)
    if failure.kind in (FailureKind.CONNECT, FailureKind.EXHAUSTED):
        return Unreachable(message, retry_after_s=1)
    return UpstreamError(message)


class RetryBudget:
    """A token bucket: every request earns a share of a retry, time earns some more, a retry costs one."""

    __slots__ = ("_balance", "_earned_at", "_limit", "_per_s", "_share")

    def __init__(self, config: RetryConfig) -> None:
        self._share = config.budget
        self._per_s = config.budget_min_per_s
        self._limit = max(1.0, config.budget_min_per_s, config.budget) * _BURST_S
        self._balance = self._per_s
        self._earned_at = 0.0

    def earn(self) -> None:
        """Count a request."""
        self._balance += self._share

    def spend(self, now: float) -> bool:
        """Pay for one retry; False where the budget is used up."""
        earned = (now - self._earned_at) * self._per_s if self._earned_at else 0.0
        self._balance = min(self._limit, self._balance + earned)
        self._earned_at = now
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


def backoff_s(config: RetryConfig, failures: int) -> float:
    """Return the wait after the ``failures``-th failure: exponential with full jitter.

    Source: Exponential Backoff And Jitter, AWS Architecture Blog, 2015.
    """
    return random() * min(config.backoff_max_s, config.backoff_s * 2.0 ** (failures - 1))
