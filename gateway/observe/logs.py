"""Logs on standard error: one JSON object a line, or plain text. No prompt, answer or credential is ever in them."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final, Literal

import msgspec

from gateway.config import LogConfig
from gateway.observe.record import RequestRecord

_SECRET: Final = re.compile(r"(://[^:@/\s]*:)[^/\s]*(?=@)|\b(bearer\s+)\S+|\bsk-[\w-]{8,}", re.IGNORECASE)
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


class RequestLine(msgspec.Struct, omit_defaults=True):
    """What the log says of one request; fields at their default are left out."""

    ts: datetime
    level: str
    event: str
    request_id: str
    path: str
    status: int
    outcome: str
    duration_ms: float
    model: str = ""
    worker: str = ""
    reason: str = ""
    stream: bool = False
    attempts: int = 0
    decision_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int = 0
    predicted_hit_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    resumptions: int | None = None


class RequestLog:
    """Writes one line per request, past the logging module. All that end in one turn of the loop share a write.

    Args:
        form: ``json`` or ``text``.
        stream: where to; default standard error.
    """

    def __init__(self, form: Literal["json", "text"], stream: BinaryIO | None = None) -> None:
        self._text = form == "text"
        self._stream = stream
        self._lines: list[bytes] = []

    def write(self, record: RequestRecord) -> None:
        """Write a request's line at the end of this turn of the event loop."""
        line = _request_line(record)
        self._lines.append(_text_of(line) if self._text else _json_of(line))
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        stream = self._stream or sys.stderr.buffer
        stream.write(b"".join(lines))
        stream.flush()


def setup_logs(config: LogConfig) -> None:
    """Send all logging, uvicorn's included, to standard error in the configured form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # One line per probe and per scrape is no information, nor is what each of our servers says of itself.
    for name in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class JsonFormatter(logging.Formatter):
    """One JSON object per record: ts, level, logger, message, whatever ``extra`` holds, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _without_secrets(record.getMessage()),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = _without_secrets(self.formatException(record.exc_info))
        return _json_of(line).decode().rstrip("\n")


class TextFormatter(logging.Formatter):
    """The same for reading: time, level, logger, message, then key=value pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = _without_secrets(record.getMessage())
        line = f"{when} {record.levelname} {record.name}: {_pairs({'': message, **_extra(record)})}"
        if record.exc_info:
            line += "\n" + _without_secrets(self.formatException(record.exc_info))
        return line


def _request_line(record: RequestRecord) -> RequestLine:
    received_at = record.received_at
    return RequestLine(
        datetime.now(UTC),
        "info",
        "request",
        record.request_id,
        record.shown_path,
        record.status,
        record.outcome,
        _milliseconds(record.ended_at - received_at),
        record.model,
        record.worker,
        record.reason,
        record.stream,
        record.attempts,
        _milliseconds(record.routed_at - received_at) if record.routed_at else None,
        _milliseconds(record.first_byte_at - received_at) if record.first_byte_at else None,
        record.prompt_tokens,
        record.predicted_hit_tokens,
        record.cached_tokens,
        record.output_tokens,
        record.resumptions or None,
    )


def _milliseconds(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1e3  # whole microseconds, at a quarter of the cost of round()


def _json_of(line: object) -> bytes:
    try:
        return _encode(line) + b"\n"
    except UnicodeEncodeError:  # lone surrogates, from bytes that are not UTF-8
        fields = msgspec.to_builtins(line, builtin_types=(datetime,), enc_hook=str)
        return _encode({key: _encodable(value) for key, value in fields.items()}) + b"\n"


def _text_of(line: RequestLine) -> bytes:
    fields = {key: value for key, value in msgspec.structs.asdict(line).items() if value not in ("", None)}
    when = fields.pop("ts").isoformat(timespec="milliseconds")
    del fields["level"], fields["event"]
    return f"{when} INFO request: {_pairs(fields)}\n".encode("utf-8", "backslashreplace")


def _pairs(fields: dict[str, Any]) -> str:
    """Return ``key=value key=value``; values that could be taken for more than one, or break the line, are quoted."""
    return " ".join(f"{key}={_quoted(value)}" if key else _one_line(str(value)) for key, value in fields.items())


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else _encode(_encodable(text)).decode()


def _one_line(text: str) -> str:
    return text if text.isprintable() else _encode(_encodable(text)).decode()[1:-1]


def _encodable(value: object) -> object:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {
        key: _without_secrets(value) if isinstance(value, str) else value
        for key, value in record.__dict__.items()
        if key not in _STANDARD
    }


def _without_secrets(text: str) -> str:
    return _SECRET.sub(lambda match: f"{match[1] or match[2] or ''}***", text)
