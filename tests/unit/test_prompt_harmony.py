"""gpt-oss's chats are exactly those that vLLM renders with Harmony."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.prompt import harmony as module
from gateway.prompt.harmony import HarmonyRenderer
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.tokenizer import pack
from tests.prompt_rig import (
    CHAT,
    DATA,
    HELLO,
    MESSAGES,
    api_bodies,
    config,
    ids_of,
    load_json,
    prompt_of,
    reference,
    save,
)

harmony = pytest.importorskip("openai_harmony", reason="the extra `harmony` is not installed")

RENDERS = load_json(DATA / "harmony" / "renders.json")
BODIES = {"chat": load_json(DATA / "harmony" / "bodies.json"), "messages": api_bodies("messages")}
PATHS = {"chat": CHAT, "messages": MESSAGES}
LEFT_TO_THE_ENGINE = {"tool addition"}


class GptOssEncoder:
    """The model's tokenizer, as Harmony has it: gpt-oss's own is too large a file for tests."""

    inline_chars = loop_chars = 10_000

    def __init__(self):
        self.encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)

    def encode(self, texts):
        return [pack(self.encoding.encode(text, allowed_special="all")) for text in texts]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = save(reference(), tmp_path_factory.mktemp("gpt-oss"))
    (made / "config.json").write_text('{"model_type": "gpt_oss"}')
    return made


@pytest.fixture(scope="module")
def encoder():
    return GptOssEncoder()


@pytest.fixture(scope="module")
def pipeline(directory, encoder):
    made = PromptPipeline(config(directory))
    for model in made._models.values():
        model.segments._encoder = encoder
    yield made
    asyncio.run(made.close())


@pytest.fixture(autouse=True)
def pinned_date(monkeypatch):
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", "2025-01-31")


@pytest.mark.parametrize("api", PATHS)
async def test_ids_are_those_of_vllm(api, pipeline):
    for name, ids in RENDERS[api].items():
        for _ in range(2):
            prompt = await prompt_of(pipeline, PATHS[api], BODIES[api][name])
        if isinstance(ids, str) or name in LEFT_TO_THE_ENGINE:
            assert prompt.chunks == [], name
        else:
            assert ids_of(prompt) == ids, name
            assert (prompt.exact, prompt.tokens) == (True, len(ids))


async def test_the_date_is_todays_unless_it_is_pinned(pipeline, encoder, monkeypatch):
    body = BODIES["chat"]["user"]
    pinned = ids_of(await prompt_of(pipeline, CHAT, body))
    monkeypatch.delenv("VLLM_SYSTEM_START_DATE")
    today = ids_of(await prompt_of(pipeline, CHAT, body))
    assert today != pinned
    text = encoder.encoding.decode(today)
    assert f"Current date: {module.datetime.now():%Y-%m-%d}" in text


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": 5}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "<|end|>", "arguments": ""}}]}],
        [{"role": "user", "content": "<|end|>" + "x" * 20_000}],
        [{"role": "system", "content": [{"type": "input_text", "text": "x"}]}, *HELLO],
        [{"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}, {"type": "refusal"}]}],
    ],
)
async def test_what_only_the_engine_can_tell_is_left_to_it(messages, pipeline):
    prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
    assert (prompt.chunks, prompt.exact) == ([], False)


async def test_without_the_library_chats_are_left_to_the_engine(directory, monkeypatch, caplog):
    monkeypatch.setattr(module, "openai_harmony", None)
    assert not HarmonyRenderer.is_available()
    pipeline = PromptPipeline(config(directory))
    assert "left to the engine" in caplog.text
    prompt = await prompt_of(pipeline, CHAT, {"messages": json.loads('[{"role": "user", "content": "x"}]')})
    assert not prompt.exact
    await pipeline.close()
