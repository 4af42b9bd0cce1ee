"""Which policies decide, and another one in place of one of them while requests run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import ValidationError

from gateway.config_source import describe_mistakes
from gateway.errors import BadRequest, UnknownModel
from gateway.relay.policies import PolicyChange

if TYPE_CHECKING:
    from gateway.app import Gateway

log = logging.getLogger("kvway.admin")


def add_policy_paths(app: FastAPI, gateway: Gateway) -> None:
    """Add ``/admin/policy`` to the admin app."""

    @app.get("/admin/policy")
    async def policies() -> dict[str, Any]:
        """The policies in force: the default one, those of models and those of paths, with all their parameters."""
        return gateway.services.policies.describe()

    @app.put("/admin/policy", openapi_extra={"requestBody": _body_schema()})
    async def change_policy(request: Request) -> dict[str, Any]:
        """Let another policy decide from the next request on, in this process and until it ends."""
        change = _read_change(gateway, await request.body())
        gateway.services.policies.put(change, model=change.model, path=change.path)
        log.info(
            "policy changed", extra=change.model_dump(exclude_none=True, exclude={"name"}) | {"policy": change.name}
        )
        return gateway.services.policies.describe()


def _read_change(gateway: Gateway, body: bytes) -> PolicyChange:
    try:
        change = PolicyChange.model_validate_json(body)
    except ValidationError as error:
        raise BadRequest("; ".join(describe_mistakes(error, PolicyChange, "PUT /admin/policy", {}))) from None
    known = {*gateway.registry.model_names(), *gateway.config.models, "*"}
    if change.model is not None and change.model not in known:
        raise UnknownModel(f"There is no model {change.model!r}; models: {', '.join(sorted(known))}.", param="model")
    return change


def _body_schema() -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": PolicyChange.model_json_schema()}}}
