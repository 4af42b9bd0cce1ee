"""From a request to chunk hashes, by every source of tokens."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import random
from array import array
from itertools import islice

import msgspec
import pytest
from tokenizers import AddedToken, processors

from gateway.config import Config
from gateway.prompt import pipeline as module
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.request import parse_request
from gateway.prompt.tokenizer import FastEncoder, HuggingFaceEncoder, pack
from policies.chunks import ChunkHasher
from tests.prompt_rig import (
    BODIES,
    CHAT,
    COMPLETIONS,
    DATA,
    SPECIAL_TOKENS,
    TEMPLATE_NAMES,
    TEMPLATES,
    TINY,
    agent_texts,
    candidates,
    config,
    load_json,
    prompt_of,
    reference,
    save,
    template,
    train,
)

RENDERS = load_json(TEMPLATES / "renders.json")
RECORDED = load_json(DATA / "vllm-0.32" / "requests_and_events.json")
HELLO = [{"role": "user", "content": "Hello!"}]
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}


@pytest.fixture(scope="module")
def pipeline():
    made = PromptPipeline(config())
    yield made
    asyncio.run(made.close())


def ids_of(prompt) -> list[int]:
    return array("I", prompt.ids).tolist()


def recorded(path: str) -> list[dict]:
    return [entry for entry in RECORDED["log"] if entry["path"] == path]


def stored_tokens(entry: dict) -> list[int]:
    """Return the prompt's tokens as the engine's own events tell them."""
    start, end = entry["event_index"]
    batches = [msgspec.msgpack.decode(base64.b64decode(frames[2])) for frames in RECORDED["frames"][start:end]]
    return [token for batch in batches for event in batch[1] for token in event["token_ids"]]


class TestAgainstARealEngine:
    async def test_chat_ids_are_those_of_the_engines_tokenize(self, pipeline):
        [entry] = recorded("/tokenize")
        for _ in range(4):  # from the template at first, from a plan later
            prompt = await prompt_of(pipeline, CHAT, entry["request"])
            assert ids_of(prompt) == entry["response"]["tokens"]
            assert (prompt.tokens, prompt.exact) == (entry["response"]["count"], True)

    async def test_chat_ids_are_those_in_the_engines_events(self, pipeline):
        first, second = recorded(CHAT)
        ids = ids_of(await prompt_of(pipeline, CHAT, first["request"]))
        assert stored_tokens(first)[: len(ids)] == ids[: len(stored_tokens(first))]
        assert len(ids) == first["response"]["usage"]["prompt_tokens"]
        assert (
            len(ids_of(await prompt_of(pipeline, CHAT, second["request"])))
            == second["response"]["usage"]["prompt_tokens"]
        )

    async def test_completion_ids_are_those_in_the_engines_events(self, pipeline):
        for entry in recorded(COMPLETIONS):
            ids = ids_of(await prompt_of(pipeline, COMPLETIONS, entry["request"]))
            stored = stored_tokens(entry)
            assert stored[: len(ids)] == ids[: len(stored)]
            assert len(ids) == entry["response"]["usage"]["prompt_tokens"]


class TestExactness:
    @pytest.mark.parametrize("name", TEMPLATE_NAMES)
    async def test_ids_are_those_of_the_whole_rendered_text(self, name, tmp_path):
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

    async def test_ids_are_those_of_hugging_face_on_recorded_agent_texts(self, pipeline):
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

    async def test_chunks_are_the_chain_over_all_ids(self, pipeline):
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
    async def test_special_tokens_go_around_a_text_where_the_engine_puts_them(self, add, tmp_path):
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

    async def test_a_long_text_and_a_long_conversation_leave_the_event_loop(self, pipeline):
        whole = reference()
        text = "some words and more of them, " * (FastEncoder.inline_chars // 20)
        assert ids_of(await prompt_of(pipeline, COMPLETIONS, {"prompt": text})) == whole.encode(text).ids
        messages = [{"role": "user", "content": f"number {number}"} for number in range(module._INLINE_MESSAGES + 1)]
        rendered = "".join(f"<|im_start|>user\n{message['content']}<|im_end|>\n" for message in messages)
        prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
        assert ids_of(prompt) == whole.encode(rendered + "<|im_start|>assistant\n").ids


class TestWarmth:
    async def test_what_is_known_and_short_is_answered_without_suspending(self, pipeline):
        request = parse_request(CHAT, json.dumps({"messages": HELLO}).encode())
        for _ in range(3):
            with pytest.raises(StopIteration):
                pipeline.prompt(request, candidates()).send(None)

    async def test_a_shape_that_comes_again_gets_a_plan(self, pipeline, monkeypatch):
        [model] = pipeline._models.values()
        seen = {"messages": [{"role": "a role of its own", "content": "Hello!"}]}
        await prompt_of(pipeline, CHAT, seen)
        await prompt_of(pipeline, CHAT, seen)
        other = {"messages": [{"role": "a role of its own", "content": "Other text"}]}
        request = parse_request(CHAT, json.dumps(other).encode())
        async with asyncio.timeout(5):
            while model.renderer.planned(request, module.outline(request.messages, False)) is None:
                await asyncio.sleep(0.001)
        monkeypatch.setattr(model.renderer, "rendered", None)  # the template is not needed any more
        prompt = await pipeline.prompt(request, candidates())
        rendered = "<|im_start|>a role of its own\nOther text<|im_end|>\n<|im_start|>assistant\n"
        assert ids_of(prompt) == reference().encode(rendered).ids

    async def test_models_with_the_same_tokenizer_share_its_cache(self, tmp_path):
        save(reference(), tmp_path)
        settings = {"models": {"a": {"tokenizer": str(TINY)}, "b": {"tokenizer": str(tmp_path)}, "c": {}}}
        pipeline = PromptPipeline(Config.model_validate(settings))
        one, other = pipeline._models.values()
        # the copy lies without its template and configuration; its ids are the same all the same
        assert one.segments is other.segments
        await pipeline.close()


class TestTokenIds:
    async def test_token_ids_need_no_tokenizer(self):
        pipeline = PromptPipeline(config(None, chunk_tokens=4))
        prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": [1, 2, 3, 4, 5]})
        hasher = ChunkHasher(4)
        assert (prompt.tokens, prompt.exact, ids_of(prompt)) == (5, True, [1, 2, 3, 4, 5])
        assert prompt.chunks == hasher.chain(hasher.root("tiny"), pack([1, 2, 3, 4]))
        await pipeline.close()

    @pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], [1, "a"], [None], [[1], "a"], ["a", [1]], [["a"]]])
    async def test_ids_that_cannot_be_are_left_to_the_engine(self, ids, pipeline):
        prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": ids})
        assert (prompt.chunks, prompt.exact) == ([], False)

    async def test_several_prompts_are_routed_by_the_first_and_counted_all(self, pipeline):
        by_ids = await prompt_of(pipeline, COMPLETIONS, {"prompt": [[1] * 300, [2] * 50]})
        assert (by_ids.tokens, len(by_ids.chunks)) == (350, 1)
        single = await prompt_of(pipeline, COMPLETIONS, {"prompt": "some words " * 300})
        by_text = await prompt_of(pipeline, COMPLETIONS, {"prompt": ["some words " * 300, "x" * 400]})
        assert by_text.chunks == single.chunks
        assert by_text.tokens == single.tokens + 100


class TestWithoutTokens:
    async def test_chunks_of_bytes_are_shared_by_what_begins_alike(self):
        pipeline = PromptPipeline(config(None, chunk_tokens=16))
        system = {"role": "system", "content": "You are helpful. " * 40}
        one = await prompt_of(pipeline, CHAT, {"messages": [system, {"role": "user", "content": "One? " * 40}]})
        other = await prompt_of(pipeline, CHAT, {"messages": [system, {"role": "user", "content": "Two? " * 40}]})
        shared = sum(a == b for a, b in zip(one.chunks, other.chunks, strict=True))
        assert 5 <= shared < len(one.chunks)
        assert not one.exact
        assert one.tokens == pytest.approx(220, rel=0.2)
        assert one.ids == b""
        await pipeline.close()

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    async def test_model_adapter_and_salt_separate_them(self, path):
        pipeline = PromptPipeline(config(None, chunk_tokens=16))
        body = {"messages": [{"role": "user", "content": "x" * 200}], "prompt": "x" * 200}
        prompts = [
            await prompt_of(pipeline, path, body),
            await prompt_of(pipeline, path, body, lora="l"),
            await prompt_of(pipeline, path, body, model="other"),
            await prompt_of(pipeline, path, {**body, "cache_salt": "s"}),
        ]
        assert len({prompt.chunks[0] for prompt in prompts}) == 4
        await pipeline.close()

    async def test_the_bytes_in_a_chunk_follow_the_configured_ratio(self):
        pipeline = PromptPipeline(config(None, chunk_tokens=10, bytes_per_token=3.1))
        prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": "x" * 320})
        assert (prompt.tokens, len(prompt.chunks)) == (103, 10)  # 32 bytes a chunk: the nearest multiple of 4
        await pipeline.close()

    async def test_a_broken_tokenizer_is_said_and_the_gateway_lives(self, tmp_path, caplog):
        pipeline = PromptPipeline(config(tmp_path))
        assert f"{tmp_path}/tokenizer.json: cannot be read" in caplog.text
        prompt = await prompt_of(pipeline, CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]})
        assert (len(prompt.chunks), prompt.exact) == (4, False)
        await pipeline.close()

    async def test_a_broken_template_is_said_and_completions_stay_exact(self, tmp_path, caplog):
        (save(reference(), tmp_path) / "chat_template.jinja").write_text("{% if %}")
        pipeline = PromptPipeline(config(tmp_path))
        assert "the chat template is not valid" in caplog.text
        assert not (await prompt_of(pipeline, CHAT, {"messages": HELLO})).exact
        assert (await prompt_of(pipeline, COMPLETIONS, {"prompt": "Hello!"})).exact
        await pipeline.close()

    async def test_a_tokenizer_is_not_used_where_bytes_are_asked_for(self):
        settings = {"models": {"*": {"tokenizer": str(TINY), "source": "bytes"}}}
        pipeline = PromptPipeline(Config.model_validate(settings))
        assert not (await prompt_of(pipeline, CHAT, {"messages": HELLO})).exact
        await pipeline.close()


class TestMedia:
    @pytest.mark.parametrize("name", ["chatml", "parts"])
    async def test_the_reusable_prefix_ends_before_the_first_picture(self, name, tmp_path):
        tokens = "<|im_start|> <|im_end|> <|turn|> <|end|> <|image|>".split()
        added = [AddedToken(token, special=True, normalized=False) for token in tokens]
        (save(train("byte-level", added), tmp_path) / "chat_template.jinja").write_text(template(name).source)
        pipeline = PromptPipeline(config(tmp_path, chunk_tokens=16))
        text = {"role": "user", "content": "What is in the picture that follows? " * 10}
        picture = {"role": "user", "content": [PICTURE, {"type": "text", "text": "This one. " * 40}]}
        plain = await prompt_of(pipeline, CHAT, {"messages": [text, {"role": "user", "content": "This one. " * 40}]})
        for following in ([], [text]):
            prompt = await prompt_of(pipeline, CHAT, {"messages": [text, picture, *following]})
            assert not prompt.exact
            assert 5 < len(prompt.chunks) < len(plain.chunks) // 2 + 1
            assert prompt.chunks == plain.chunks[: len(prompt.chunks)]
        await pipeline.close()

    async def test_a_picture_at_the_beginning_leaves_no_prefix(self, pipeline):
        messages = [{"role": "user", "content": [{"type": "text", "text": "x " * 2000}, PICTURE]}]
        prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
        assert prompt.chunks == []
        assert prompt.tokens > 500

    async def test_a_picture_that_changes_what_comes_before_it_leaves_no_prefix(self, tmp_path):
        source = (
            "{% set ns = namespace(seen=false) %}{% for m in messages %}{% for c in m.content %}"
            "{% if c.type == 'image' %}{% set ns.seen = true %}{% endif %}{% endfor %}{% endfor %}"
            "{{ 'With pictures.' if ns.seen else 'Without.' }}"
            "{% for m in messages %}<|im_start|>{{ m.content[-1].text }}{% endfor %}"
        )
        (save(reference(), tmp_path) / "chat_template.jinja").write_text(source)
        pipeline = PromptPipeline(config(tmp_path, chunk_tokens=16))
        picture = {"role": "user", "content": [PICTURE, {"type": "text", "text": "y"}]}
        prompt = await prompt_of(pipeline, CHAT, {"messages": [{"role": "user", "content": "x " * 500}, picture]})
        assert prompt.chunks == []
        await pipeline.close()


class TestLeftToTheEngine:
    @pytest.mark.parametrize(
        "body",
        [
            {"messages": []},
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            {"messages": HELLO, "tools": []},
            {"messages": HELLO, "chat_template": "{{ messages }}"},
            {"messages": HELLO, "chat_template_kwargs": [1]},
            {"messages": HELLO, "chat_template_kwargs": {"tools": []}},
            {"messages": HELLO, "continue_final_message": True},
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
        ],
    )
    async def test_prompts_that_cannot_be_read_have_a_length_and_no_chunks(self, body, pipeline):
        prompt = await prompt_of(pipeline, CHAT, body)
        assert (prompt.chunks, prompt.exact, prompt.ids) == ([], False, b"")
        assert prompt.tokens == max(1, len(json.dumps(body)) // 4)

    async def test_a_lone_surrogate_in_arguments_is_left_to_it(self, tmp_path):
        (save(reference(), tmp_path) / "chat_template.jinja").write_text(template("qwen2").source)
        pipeline = PromptPipeline(config(tmp_path))
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
        body = {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]}
        assert (await prompt_of(pipeline, CHAT, body)).chunks == []
        await pipeline.close()

    async def test_ten_thousand_messages_are_no_trouble(self, pipeline):
        messages = [{"role": "user", "content": "x"}] * 10_000
        prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
        assert prompt.exact


def test_slow_tokenizers_leave_the_event_loop_sooner():
    assert HuggingFaceEncoder.inline_chars < FastEncoder.inline_chars
