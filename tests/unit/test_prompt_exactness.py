"""Token ids and chunk hashes are exactly the engine's."""

from __future__ import annotations

import base64
import gzip
import json
import random
from itertools import islice

import msgspec
import pytest
from tokenizers import AddedToken, processors

from gateway.prompt import pipeline as module
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.tokenizer import FastEncoder
from policies.chunks import ChunkHasher
from tests.prompt_rig import (
    BODIES,
    CHAT,
    COMPLETIONS,
    DATA,
    HELLO,
    SPECIAL_TOKENS,
    TEMPLATE_NAMES,
    TEMPLATES,
    agent_texts,
    config,
    ids_of,
    load_json,
    prompt_of,
    reference,
    save,
    template,
    train,
)

RENDERS = load_json(TEMPLATES / "renders.json")
RECORDED = load_json(DATA / "vllm-0.32" / "requests_and_events.json")


def recorded(path: str) -> list[dict]:
    return [entry for entry in RECORDED["log"] if entry["path"] == path]


def stored_tokens(entry: dict) -> list[int]:
    """Return the prompt's tokens as the engine's own events tell them."""
    start, end = entry["event_index"]
    batches = [msgspec.msgpack.decode(base64.b64decode(frames[2])) for frames in RECORDED["frames"][start:end]]
    return [token for batch in batches for event in batch[1] for token in event["token_ids"]]


async def test_chat_ids_are_those_of_the_engines_tokenize(pipeline):
    [entry] = recorded("/tokenize")
    for _ in range(4):  # from the template at first, from a plan later
        prompt = await prompt_of(pipeline, CHAT, entry["request"])
        assert ids_of(prompt) == entry["response"]["tokens"]
        assert (prompt.tokens, prompt.exact) == (entry["response"]["count"], True)


async def test_chat_ids_are_those_in_the_engines_events(pipeline):
    first, second = recorded(CHAT)
    ids = ids_of(await prompt_of(pipeline, CHAT, first["request"]))
    assert stored_tokens(first)[: len(ids)] == ids[: len(stored_tokens(first))]
    assert len(ids) == first["response"]["usage"]["prompt_tokens"]
    assert (
        len(ids_of(await prompt_of(pipeline, CHAT, second["request"]))) == second["response"]["usage"]["prompt_tokens"]
    )


async def test_completion_ids_are_those_in_the_engines_events(pipeline):
    for entry in recorded(COMPLETIONS):
        ids = ids_of(await prompt_of(pipeline, COMPLETIONS, entry["request"]))
        stored = stored_tokens(entry)
        assert stored[: len(ids)] == ids[: len(stored)]
        assert len(ids) == entry["response"]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
async def test_ids_are_those_of_the_whole_rendered_text(name, tmp_path):
    source = template(name).source
    special = sorted({part for part in source.replace("'", " ").replace('"', " ").split() if part[:1] in "<["})
    added = [AddedToken(token, special=True, normalized=False) for token in [*special, "<s>", "</s>"]]
    whole = train("byte-level", added)
    (save(whole, tmp_path, SPECIAL_TOKENS) / "chat_template.jinja").write_text(source)
    pipeline = PromptPipeline(config(tmp_path))
    for body, rendered in RENDERS[name].items():
        prompt = await prompt_of(pipeline, CHAT, BODIES[body])
        if "text" in rendered:
            assert ids_of(prompt) == whole.encode(rendered["text"], add_special_tokens=False).ids
            assert (prompt.tokens, prompt.exact) == (len(prompt.ids) // 4, True)
        else:
            assert (prompt.chunks, prompt.exact) == ([], False)
    await pipeline.close()


async def test_ids_are_those_of_hugging_face_on_recorded_agent_texts(pipeline):
    whole = reference()
    texts = []
    for file in agent_texts():
        with gzip.open(file, "rt") as lines:
            texts += [json.loads(line)["input"] for line in islice(lines, 40)]
    sample = random.Random(0).sample(texts, min(len(texts), 40))
    for text in (text[-12_000:] for text in sample):
        completion = await prompt_of(pipeline, COMPLETIONS, {"prompt": text})
        assert ids_of(completion) == whole.encode(text).ids
        chat = await prompt_of(pipeline, CHAT, {"messages": [{"role": "user", "content": text}]})
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert ids_of(chat) == whole.encode(rendered).ids


async def test_chunks_are_the_chain_over_all_ids(pipeline):
    hasher = ChunkHasher(256)
    messages = [{"role": "user", "content": f"{number} words " * 100} for number in range(7)]
    for salt in (None, "tenant"):
        body = {"messages": messages, "cache_salt": salt}
        for wanted in ({}, {"lora": "adapter"}):
            prompt = await prompt_of(pipeline, CHAT, body, **wanted)
            root = hasher.root("tiny", wanted.get("lora"), salt)
            assert prompt.chunks == hasher.chain(root, prompt.ids)
            assert len(prompt.chunks) == prompt.tokens // 256 > 1


@pytest.mark.parametrize("add", [True, False, None])
async def test_special_tokens_go_around_a_text_where_the_engine_puts_them(add, tmp_path):
    tokenizer = train("byte-level", [AddedToken("<s>", special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    (save(tokenizer, tmp_path) / "chat_template.jinja").write_text("{{ messages[0].content }}")
    pipeline = PromptPipeline(config(tmp_path))
    fields = {} if add is None else {"add_special_tokens": add}
    completion = await prompt_of(pipeline, COMPLETIONS, {"prompt": "Hello!", **fields})
    assert ids_of(completion) == tokenizer.encode("Hello!", add_special_tokens=add is not False).ids
    chat = await prompt_of(pipeline, CHAT, {"messages": HELLO, **fields})
    assert ids_of(chat) == tokenizer.encode("Hello!", add_special_tokens=add is True).ids
    await pipeline.close()


async def test_a_long_text_and_a_long_conversation_leave_the_event_loop(pipeline):
    whole = reference()
    text = "some words and more of them, " * (FastEncoder.inline_chars // 20)
    assert ids_of(await prompt_of(pipeline, COMPLETIONS, {"prompt": text})) == whole.encode(text).ids
    messages = [{"role": "user", "content": f"number {number}"} for number in range(module._INLINE_MESSAGES + 1)]
    rendered = "".join(f"<|im_start|>user\n{message['content']}<|im_end|>\n" for message in messages)
    prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
    assert ids_of(prompt) == whole.encode(rendered + "<|im_start|>assistant\n").ids
