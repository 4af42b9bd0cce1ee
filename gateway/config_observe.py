"""The sections of ``kvway.yaml`` about what is written down of requests: logs, recordings, traces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from gateway.config_sections import Section, has_host_and_port
from gateway.config_source import without_password


class RecorderConfig(Section):
    """Traces of real traffic for `kvway sim`: times, lengths and salted hashes of prompt chunks, never text."""

    directory: Path | None = Field(None, description="where trace files are written; without it nothing is recorded")
    max_file_bytes: int = Field(64 * 2**20, ge=4096, description="size at which the next file is begun")
    max_files: int = Field(16, ge=1, description="files kept in the directory; the oldest are removed")
    queue: int = Field(10_000, ge=1, description="requests that wait to be written; more are dropped and counted")
    flush_s: float = Field(1.0, gt=0, description="time between writes")
    salt: str = Field(
        "",
        repr=False,
        description="secret of the hashes, the same where recordings are read together; empty: a random one",
    )


class LogConfig(Section):
    """Logs go to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level")
    format: Literal["json", "text"] = Field("json", description="json: one object a line")
    requests: bool = Field(True, description="one line per request")


class TracingConfig(Section):
    """OpenTelemetry spans of requests; needs `pip install 'kvway[otel]'`; see docs/observing.md."""

    endpoint: str | None = Field(
        None,
        description="OTLP/HTTP URL of a collector, `http://collector:4318`, with its path if that is not /v1/traces; "
        "without it there are no spans, and a client's `traceparent` passes as it is",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the requests without a `traceparent` to trace; with one, its flag decides",
    )

    @field_validator("endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = re.fullmatch(r"(https?://[^/?#@\s]+)(/[^?#@\s]*)?", value)
        if match is None or not has_host_and_port(value):
            raise ValueError(
                f"{without_password(value)!r} is not an OTLP/HTTP URL; write http://host:4318, and put credentials "
                "into the environment variable OTEL_EXPORTER_OTLP_HEADERS"
            )
        return match[1] + "/v1/traces" if match[2] in (None, "/") else value
