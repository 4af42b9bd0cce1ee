"""Prompts from the engine's ``/render``, over real sockets: special renderers, media, templates of requests."""

from __future__ import annotations

import json
from array import array

import msgspec
import pytest

from gateway.config import Config
from gateway.events.assembler import Assembler
from gateway.events.decode import decode_batch
from gateway.prompt import harmony as harmony_module
from gateway.prompt.engine import without_tensors
from gateway.prompt.pipeline import PromptPipeline
from policies.base import Tier
from policies.chunks import ChunkHasher
from tests.integration.engine import Engine
from tests.prompt_rig import CHAT, COMPLETIONS, HELLO, MESSAGES, RESPONSES, TINY, ids_of, prompt_of, reference, save

IDS = list(range(1, 601))
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]}
BODIES = {
    CHAT: {"messages": HELLO},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    RESPONSES: {"input": "Hello!"},
}


def rendered(**features):
    return json.dumps({"token_ids": IDS, "features": features or None}).encode()


def with_pictures(*places):
    """Return a rendered prompt with pictures: name, offset and length of each."""
    return rendered(
        mm_hashes={"image": [name for name, *_ in places]},
        mm_placeholders={"image": [{"offset": offset, "length": length} for _, offset, length in places]},
    )


def pipeline_with(**model):
    return PromptPipeline(Config.model_validate({"models": {"*": model}}))


@pytest.fixture
def harmony(tmp_path, monkeypatch):
    monkeypatch.setattr(harmony_module, "openai_harmony", None)  # as without the extra
    (save(reference(), tmp_path) / "config.json").write_text('{"model_type": "gpt_oss"}')
    (tmp_path / "chat_template.jinja").write_text("not what vLLM uses: {{ messages[0].content }}")
    return str(tmp_path)


@pytest.mark.parametrize("path", BODIES)
async def test_a_special_renderers_chats_are_rendered_by_the_engine(path, harmony, caplog):
    pipeline = pipeline_with(tokenizer=harmony)
    assert "with Harmony" in caplog.text
    async with Engine({f"{path}/render": rendered()}) as engine:
        prompt = await prompt_of(pipeline, path, BODIES[path], url=engine.url)
    assert (ids_of(prompt), prompt.exact, prompt.tokenized) == (IDS, True, False)
    hasher = ChunkHasher(256)
    assert prompt.chunks == hasher.chain(hasher.root("tiny"), array("I", IDS).tobytes())
    await pipeline.close()


async def test_its_completions_are_tokenized_here(harmony):
    pipeline = pipeline_with(tokenizer=harmony)
    prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": "Hello!"})
    assert ids_of(prompt) == reference().encode("Hello!").ids
    await pipeline.close()


async def test_harmony_is_not_taken_from_tokenize_which_renders_the_template(harmony, caplog):
    pipeline = pipeline_with(tokenizer=harmony)
    async with Engine({"/tokenize": b'{"tokens": [1, 2, 3]}'}) as engine:
        for _ in range(3):
            prompt = await prompt_of(pipeline, CHAT, {"messages": HELLO}, url=engine.url)
            assert not prompt.exact
    assert engine.asked == [f"{CHAT}/render"]
    assert caplog.text.count("start vLLM with --enable-scale-out") == 1
    await pipeline.close()


async def test_an_engine_with_a_tokenizer_of_its_own_tokenizes_completions_too(tmp_path):
    (save(reference(), tmp_path) / "tekken.json").touch()
    pipeline = pipeline_with(tokenizer=str(tmp_path))
    async with Engine({"/tokenize": b'{"tokens": [1, 2, 3]}'}) as engine:
        for path, body in ((COMPLETIONS, {"prompt": "Hello!"}), (CHAT, {"messages": HELLO})):
            assert ids_of(await prompt_of(pipeline, path, body, url=engine.url)) == [1, 2, 3]
    await pipeline.close()


@pytest.mark.parametrize("source", [{"source": "engine"}, {"tokenizer": str(TINY)}])
@pytest.mark.parametrize(
    "places",
    [
        [("aa", 10, 20)],
        [("aa", 250, 10), ("bb", 300, 200)],
        [("aa", 0, 600)],
        [("aa", 3, 4), ("aa", 9, 4)],
        [("aa", 0, 40), ("aa", 40, 40), ("bb", 80, 300), ("aa", 380, 3)],
    ],
)
async def test_media_are_in_the_chunks_as_they_are_in_those_of_the_engines_events(places, source):
    pipeline = pipeline_with(media="engine", **source)
    async with Engine({f"{CHAT}/render": with_pictures(*places)}) as engine:
        prompt = await prompt_of(pipeline, CHAT, {"messages": [PICTURE]}, url=engine.url)
    assert prompt.exact
    assert prompt.chunks == chunks_in_events(places)
    await pipeline.close()


def chunks_in_events(places, block=16):
    """Return the chunks that the assembler makes of a vLLM's events about a prompt with media."""
    blocks = len(IDS) // block
    keys = [
        [[name, at - start] for name, at, length in places if at < start + block and at + length > start] or None
        for start in range(0, blocks * block, block)
    ]
    event = {"type": "BlockStored", "block_hashes": list(range(blocks)), "parent_block_hash": None}
    event |= {"token_ids": IDS[: blocks * block], "block_size": block, "extra_keys": keys, "medium": "GPU"}
    assembler = Assembler(ChunkHasher(256), "tiny")
    assembler.apply(decode_batch(msgspec.msgpack.encode([0.0, [event], None])).events)
    [run] = assembler.take().stored
    assert run.tier is Tier.HBM
    return run.chunks


@pytest.mark.parametrize("names", [("aa", "bb"), ("aab", "abb"), ("aba", "aab")])
async def test_other_media_or_the_same_in_another_order_are_other_chunks(names):
    pipeline = pipeline_with(source="engine", media="engine")
    chunks = set()
    for name in names:
        pictures = with_pictures(*((one, 300 + 10 * number, 10) for number, one in enumerate(name)))
        async with Engine({f"{CHAT}/render": pictures}) as engine:
            prompt = await prompt_of(pipeline, CHAT, {"messages": [PICTURE]}, url=engine.url)
            chunks.add(tuple(prompt.chunks))
    (one, other) = chunks
    assert (one[0], one[1] == other[1]) == (other[0], False)
    await pipeline.close()


async def test_media_that_no_engine_renders_end_the_prefix():
    pipeline = pipeline_with(tokenizer=str(TINY), media="engine")
    messages = [{"role": "user", "content": "some words " * 600}, PICTURE]
    async with Engine() as engine:
        prompt = await prompt_of(pipeline, CHAT, {"messages": messages}, url=engine.url)
    assert not prompt.exact
    assert len(prompt.chunks) > 1
    await pipeline.close()


async def test_without_a_tokenizer_other_pictures_are_other_chunks():
    pipeline = pipeline_with(source="bytes")
    for path, field in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        chunks = {tuple((await prompt_of(pipeline, path, {field: [picture(path, data)]})).chunks) for data in "AB"}
        assert len(chunks) == 2
    await pipeline.close()


def picture(path, letter):
    data = letter * 3000
    url = f"data:image/png;base64,{data}"
    part = {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        RESPONSES: {"type": "input_image", "image_url": url},
    }[path]
    return {"role": "user", "content": [part]}


async def test_a_requests_own_template_is_rendered_by_engines_that_take_it():
    body = {"messages": HELLO, "chat_template": "{{ messages }}"}
    trusting = pipeline_with(tokenizer=str(TINY), trust_request_chat_template=True)
    async with Engine({"/tokenize": json.dumps({"tokens": IDS}).encode()}) as engine:
        assert ids_of(await prompt_of(trusting, CHAT, body, url=engine.url)) == IDS
        asked = len(engine.asked)
        wary = pipeline_with(tokenizer=str(TINY))
        prompt = await prompt_of(wary, CHAT, body, url=engine.url)
        assert (prompt.chunks, len(engine.asked)) == ([], asked)
    await trusting.close()
    await wary.close()


def test_media_are_asked_for_by_name_only():
    assert json.loads(without_tensors(b'{"messages": [1.50], "mm_payload": "tensors"}')) == {
        "messages": [1.5],
        "mm_payload": "none",
    }
    assert without_tensors(b'{"a": NaN}') == b'{"a": NaN}'
