"""Whether traffic is recorded, and a switch for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import Field, ValidationError

from gateway.config_sections import Section
from gateway.config_source import describe_mistakes
from gateway.errors import BadRequest

if TYPE_CHECKING:
    from gateway.app import Gateway

log = logging.getLogger("kvway.admin")


class RecorderSwitch(Section):
    """What is to become of the requests that end from now on."""

    recording: bool = Field(description="whether they are recorded")


def add_recorder_paths(app: FastAPI, gateway: Gateway) -> None:
    """Add ``/admin/recorder`` to the admin app."""

    @app.get("/admin/recorder")
    async def recorder() -> dict[str, Any]:
        """Whether traffic is recorded, into which file, and how many requests were written, wait and were dropped."""
        if gateway.recorder is None:
            return {"recording": False, "file": None, "written": 0, "waiting": 0, "dropped": 0}
        return gateway.recorder.describe()

    @app.put("/admin/recorder", openapi_extra={"requestBody": _body_schema()})
    async def switch_recorder(request: Request) -> dict[str, Any]:
        """Record, or leave out, the requests that end from now on, in this process and until it ends."""
        try:
            switch = RecorderSwitch.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadRequest("; ".join(describe_mistakes(error, RecorderSwitch, "PUT /admin/recorder", {}))) from None
        if gateway.recorder is None:
            raise BadRequest("There is nowhere to record to: set recorder.directory and restart.")
        gateway.recorder.recording = switch.recording
        log.info("recorder switched", extra={"recording": switch.recording})
        return gateway.recorder.describe()


def _body_schema() -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": RecorderSwitch.model_json_schema()}}}
