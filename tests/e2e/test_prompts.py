"""Our tokens are a real engine's: held against ``/tokenize``, and against what vLLM would run of the body itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest

from gateway.config import Config
from gateway.prompt.pipeline import PromptPipeline, _payload
from tests.e2e.conftest import MODEL, TEMPLATE, Engine
from tests.e2e.corpus import Body, chats, completions
from tests.prompt_rig import CHAT, COMPLETIONS, TEMPLATE_NAMES, TEMPLATES, chat_request, ids_of, prompt_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CHATS, COMPLETED = chats(), completions()


@pytest.fixture
async def client(engines: list[Engine]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engines[0].url, timeout=60) as client:
        yield client


async def ask(client: httpx.AsyncClient, path: str, bodies: Mapping[str, Body], **more: object) -> dict[str, list[int]]:
    """Return the engine's ids by name of the body, of the first prompt where there are several.

    Bodies that it refuses are left out: a template may not accept a conversation.
    """
    theirs = {}
    for name, body in bodies.items():
        answer = await client.post(path, json={"model": "tiny"} | body | more)
        assert answer.status_code in (200, 400), f"{name}: {answer.text}"
        if answer.status_code == 200:
            given = answer.json()
            first = given[0] if isinstance(given, list) else given
            theirs[name] = first["tokens"] if path == "/tokenize" else first["token_ids"]
    return theirs


async def differing(
    template: Path, path: str, bodies: Mapping[str, Body], theirs: Mapping[str, list[int]]
) -> list[str]:
    """Return the names of bodies of which we make something else, or do not know what to make."""
    model = {"tokenizer": str(MODEL), "chat_template": str(template)}
    pipeline = PromptPipeline(Config.model_validate({"models": {"*": model}}))
    found = []
    for _ in range(3):  # the template renders, then a plan is drawn up, then it serves
        for name, ids in theirs.items():
            if ids_of(await prompt_of(pipeline, path, bodies[name])) != ids:
                found.append(name)
        await asyncio.sleep(0.1)
    await pipeline.close()
    return found


def tokenize_request(body: Body) -> Body:
    """Return what the gateway asks ``/tokenize`` about a chat."""
    payload = msgspec.to_builtins(_payload(chat_request(body)))
    return {name: value for name, value in payload.items() if value is not None}


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
async def test_chats_have_the_ids_of_tokenize_with_the_template_of_every_family(
    name: str, client: httpx.AsyncClient
) -> None:
    file = TEMPLATES / f"{name}.jinja"
    asked = {title: tokenize_request(body) for title, body in CHATS.items()}
    theirs = await ask(client, "/tokenize", asked, chat_template=file.read_text("utf-8"))
    assert len(theirs) >= 100, "the engine refuses too much for this to prove anything"
    assert await differing(file, CHAT, CHATS, theirs) == []


async def test_chats_have_the_ids_that_the_engine_would_run(client: httpx.AsyncClient) -> None:
    theirs = await ask(client, f"{CHAT}/render", CHATS, max_tokens=1)
    assert len(theirs) >= 200
    assert await differing(TEMPLATE, CHAT, CHATS, theirs) == []


async def test_completions_have_the_ids_that_the_engine_would_run(client: httpx.AsyncClient) -> None:
    theirs = await ask(client, f"{COMPLETIONS}/render", COMPLETED, max_tokens=1)
    assert theirs.keys() == COMPLETED.keys()
    assert await differing(TEMPLATE, COMPLETIONS, COMPLETED, theirs) == []


async def test_texts_have_the_ids_of_tokenize(client: httpx.AsyncClient) -> None:
    texts = {name: body for name, body in COMPLETED.items() if isinstance(body["prompt"], str)}
    theirs = await ask(client, "/tokenize", texts)
    assert theirs.keys() == texts.keys()
    assert await differing(TEMPLATE, COMPLETIONS, texts, theirs) == []


def test_the_corpus_is_as_varied_as_promised() -> None:
    distinct = {json.dumps(body, sort_keys=True) for body in [*CHATS.values(), *COMPLETED.values()]}
    assert len(distinct) >= 200
