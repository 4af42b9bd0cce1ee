"""Why a request would go where it would go."""

from __future__ import annotations
from typing import Any
from gateway.relay.services import Services

async def explain(services: Services, path: str, body: bytes) -> dict[str, Any]:
    return {}
