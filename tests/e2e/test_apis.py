"""Responses and Anthropic Messages have the ids that a real engine would run."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import TEMPLATE, Engine
from tests.e2e.test_prompts import ask, differing
from tests.prompt_rig import DATA, MESSAGES, RESPONSES, api_bodies, load_json

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Changes of tools within a conversation are left to the engine.
BODIES = {
    path: {
        name: body | {"model": "tiny"}
        for name, body in api_bodies(api).items()
        if "text" in load_json(DATA / "apis" / "renders.json")["chatml"][api][name] and name != "tool addition"
    }
    for path, api in ((MESSAGES, "messages"), (RESPONSES, "responses"))
}


@pytest.mark.parametrize("path", BODIES)
async def test_ids_are_those_that_the_engine_would_run(path: str, engines: list[Engine]) -> None:
    async with httpx.AsyncClient(base_url=engines[0].url, timeout=60) as client:
        theirs = await ask(client, f"{path}/render", BODIES[path])
    assert len(theirs) >= 25, "the engine refuses too much for this to prove anything"
    assert await differing(TEMPLATE, path, BODIES[path], theirs) == []
