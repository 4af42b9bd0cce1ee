"""Tokens from the engine's own ``/tokenize``, over real sockets."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import pytest

from gateway.config import Config
from gateway.prompt import engine as module
from gateway.prompt.pipeline import PromptPipeline
from policies.chunks import ChunkHasher
from sim.server import SimWorker
from sim.settings import WorkerSettings
from tests.integration.engine import HANG, RESET, Engine
from tests.prompt_rig import CHAT, COMPLETIONS, TINY, config, prompt_of

MESSAGES = [{"role": "system", "content": "You help. " * 100}, {"role": "user", "content": "Hello!"}]


@pytest.fixture
async def worker():
    async with SimWorker(WorkerSettings(model="tiny", tokenizer=TINY)) as running:
        yield running


@pytest.fixture
async def pipeline():
    made = PromptPipeline(Config.model_validate({"models": {"*": {"source": "engine"}}}))
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (
            CHAT,
            {"messages": MESSAGES, "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (COMPLETIONS, {"prompt": "def f(x):\n    return x\n" * 100}),
    ],
)
async def test_the_engines_tokens_are_those_of_the_tokenizer(path, body, worker, pipeline):
    local = PromptPipeline(config())
    asked = await prompt_of(pipeline, path, body | {"model": "tiny"}, url=worker.url)
    known = await prompt_of(local, path, body)
    assert array("I", asked.ids) == array("I", known.ids)
    assert (asked.tokens, asked.chunks, asked.exact) == (known.tokens, known.chunks, True)
    await local.close()


async def test_an_engine_is_asked_once_for_the_same_prompt(pipeline):
    answer = b'{"count": 300, "max_model_len": 1, "tokens": [' + b",".join([b"7"] * 300) + b"]}"
    async with Engine({"/tokenize": answer}) as engine:
        prompts = await asyncio.gather(
            *(prompt_of(pipeline, CHAT, {"messages": MESSAGES}, url=engine.url) for _ in range(5))
        )
        prompts.append(await prompt_of(pipeline, CHAT, {"messages": MESSAGES}, url=engine.url))
    assert engine.asked == ["/v1/chat/completions/render", "/tokenize"]
    hasher = ChunkHasher(256)
    expected = hasher.chain(hasher.root("tiny"), array("I", [7] * 300).tobytes())
    assert all(prompt.chunks == expected for prompt in prompts)


async def test_the_engine_is_asked_again_on_another_day(pipeline, monkeypatch):
    """Its template may tell the date."""
    today = SimpleNamespace(today=lambda: "2026-02-28")
    monkeypatch.setattr(module, "date", today)
    async with Engine({f"{CHAT}/render": b'{"token_ids": [7]}'}) as engine:
        for _ in range(2):
            await prompt_of(pipeline, CHAT, {"messages": MESSAGES}, url=engine.url)
        assert len(engine.asked) == 1
        today.today = lambda: "2026-03-01"
        await prompt_of(pipeline, CHAT, {"messages": MESSAGES}, url=engine.url)
        assert len(engine.asked) == 2


@pytest.mark.parametrize("answer", [HANG, RESET, (500, b"{}"), (404, b""), b"{}", b"[", b'{"tokens": [-1]}'])
async def test_an_engine_that_does_not_tokenize_costs_exactness_not_the_request(answer, pipeline, monkeypatch, caplog):
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    pipeline._engine = module.EngineTokenizer(2**20)
    async with Engine({"/tokenize": answer}) as engine:
        prompt = await prompt_of(
            pipeline, CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, url=engine.url
        )
    assert (len(prompt.chunks), prompt.exact) == (4, False)
    assert "approximate" in caplog.text


async def test_the_engine_is_not_asked_to_fetch_pictures(worker, pipeline):
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    prompt = await prompt_of(pipeline, CHAT, {"messages": [{"role": "user", "content": [picture]}]}, url=worker.url)
    assert (prompt.chunks, prompt.exact) == ([], False)
