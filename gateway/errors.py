"""Every error that kvway answers itself, as one small tree::

    GatewayError
    ├── BadRequest            400  the request cannot be understood
    │   ├── TooLarge          413  a configured limit was exceeded; the message names it
    │   │   └── HeadTooLarge  431
    │   └── NotFound          404
    │       └── UnknownModel
    ├── NoWorker              503  with Retry-After
    ├── NotPossible           501  what is asked for, no backend here can do
    └── UpstreamError         502  the worker failed before its first byte
        ├── UpstreamTimeout   504
        └── Unreachable       503  with Retry-After
    ConfigError               —    start-up only: printed as one message, exit code 2

Errors that a worker answers are not in here: they pass through byte for byte.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class GatewayError(Exception):
    """An error with an HTTP status and an OpenAI-shaped body.

    Args:
        message: what was wrong, where, and what to do.
        param: the field of the request it is about, where there is one.
        retry_after_s: seconds for a ``Retry-After`` header.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the OpenAI error object as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class BadRequest(GatewayError):
    """400: the request itself is wrong; sending it again will not help."""

    status = 400
    type = "invalid_request_error"


class TooLarge(BadRequest):
    """413: a limit on size was exceeded."""

    status = 413
    code = "request_too_large"


class HeadTooLarge(TooLarge):
    """431: the request line and the headers together are too long."""

    status = 431


class NotFound(BadRequest):
    """404: there is nothing of this name."""

    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    """404: no worker serves this model."""

    code = "model_not_found"


class NoWorker(GatewayError):
    """503: there is no healthy worker for this request."""

    status = 503
    type = "service_unavailable_error"
    code = "no_worker"


class NotPossible(GatewayError):
    """501: neither the engines nor what stands beside them can do this; the message says who would have to."""

    status = 501
    type = "not_possible_error"
    code = "not_possible"


class Saturated(GatewayError):
    """429: more requests wait than may."""

    status = 429
    type = "overloaded_error"
    code = "queue_full"


class UpstreamError(GatewayError):
    """502: workers were tried and failed before a first byte arrived."""

    status = 502
    type = "upstream_error"
    code = "upstream_failed"


class UpstreamTimeout(UpstreamError):
    """504: a worker did not answer within the configured time."""

    status = 504
    code = "upstream_timeout"


class Unreachable(UpstreamError):
    """503: no worker could be connected to; the request was sent to none."""

    status = 503
    type = "service_unavailable_error"
    code = "no_worker"


class ConfigError(Exception):
    """The configuration is wrong; the message says which key of which file, and what would be right."""
