"""From a request to a prompt: what is known at once, token ids, approximate chunks, media, and what is left alone."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc

import pytest
from tokenizers import AddedToken

from gateway.config import Config
from gateway.prompt import pipeline as module
from gateway.prompt.parsing import parse_request
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokenizer import pack
from policies.chunks import ChunkHasher
from tests.prompt_rig import (
    CHAT,
    COMPLETIONS,
    HELLO,
    TINY,
    candidates,
    config,
    ids_of,
    prompt_of,
    reference,
    save,
    template,
    train,
)

PICTURE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}


async def test_what_is_known_and_short_is_answered_without_suspending(pipeline):
    request = parse_request(CHAT, json.dumps({"messages": HELLO}).encode())
    for _ in range(3):
        with pytest.raises(StopIteration):
            pipeline.prompt(request, candidates()).send(None)


async def test_a_shape_that_comes_again_gets_a_plan(pipeline, monkeypatch):
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


async def test_models_with_the_same_tokenizer_share_its_cache(tmp_path):
    save(reference(), tmp_path)
    settings = {"models": {"a": {"tokenizer": str(TINY)}, "b": {"tokenizer": str(tmp_path)}, "c": {}}}
    pipeline = PromptPipeline(Config.model_validate(settings))
    one, other = pipeline._models.values()
    # the copy lies without its template and configuration; its ids are the same all the same
    assert one.segments is other.segments
    await pipeline.close()


async def test_token_ids_need_no_tokenizer():
    pipeline = PromptPipeline(config(None, chunk_tokens=4))
    prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": [1, 2, 3, 4, 5]})
    hasher = ChunkHasher(4)
    assert (prompt.tokens, prompt.exact, ids_of(prompt)) == (5, True, [1, 2, 3, 4, 5])
    assert prompt.chunks == hasher.chain(hasher.root("tiny"), pack([1, 2, 3, 4]))
    await pipeline.close()


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], [1, "a"], [None], [[1], "a"], ["a", [1]], [["a"]]])
async def test_ids_that_cannot_be_are_left_to_the_engine(ids, pipeline):
    prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": ids})
    assert (prompt.chunks, prompt.exact) == ([], False)


async def test_several_prompts_are_routed_by_the_first_and_counted_all(pipeline):
    by_ids = await prompt_of(pipeline, COMPLETIONS, {"prompt": [[1] * 300, [2] * 50]})
    assert (by_ids.tokens, len(by_ids.chunks)) == (350, 1)
    single = await prompt_of(pipeline, COMPLETIONS, {"prompt": "some words " * 300})
    by_text = await prompt_of(pipeline, COMPLETIONS, {"prompt": ["some words " * 300, "x" * 400]})
    assert by_text.chunks == single.chunks
    assert by_text.tokens == single.tokens + 100


async def test_chunks_of_bytes_are_shared_by_what_begins_alike():
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
async def test_model_adapter_and_salt_separate_them(path):
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


async def test_the_bytes_in_a_chunk_follow_the_configured_ratio():
    pipeline = PromptPipeline(config(None, chunk_tokens=10, bytes_per_token=3.1))
    prompt = await prompt_of(pipeline, COMPLETIONS, {"prompt": "x" * 320})
    assert (prompt.tokens, len(prompt.chunks)) == (103, 10)  # 32 bytes a chunk: the nearest multiple of 4
    await pipeline.close()


async def test_a_broken_tokenizer_is_said_and_the_gateway_lives(tmp_path, caplog):
    pipeline = PromptPipeline(config(tmp_path))
    assert f"{tmp_path}/tokenizer.json: cannot be read" in caplog.text
    prompt = await prompt_of(pipeline, CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]})
    assert (len(prompt.chunks), prompt.exact) == (4, False)
    await pipeline.close()


async def test_a_broken_template_is_said_and_completions_stay_exact(tmp_path, caplog):
    (save(reference(), tmp_path) / "chat_template.jinja").write_text("{% if %}")
    pipeline = PromptPipeline(config(tmp_path))
    assert "the chat template is not valid" in caplog.text
    assert not (await prompt_of(pipeline, CHAT, {"messages": HELLO})).exact
    assert (await prompt_of(pipeline, COMPLETIONS, {"prompt": "Hello!"})).exact
    await pipeline.close()


async def test_a_tokenizer_is_not_used_where_bytes_are_asked_for():
    settings = {"models": {"*": {"tokenizer": str(TINY), "source": "bytes"}}}
    pipeline = PromptPipeline(Config.model_validate(settings))
    assert not (await prompt_of(pipeline, CHAT, {"messages": HELLO})).exact
    await pipeline.close()


@pytest.mark.parametrize("name", ["chatml", "parts"])
async def test_the_reusable_prefix_ends_before_the_first_picture(name, tmp_path):
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


async def test_a_picture_at_the_beginning_leaves_no_prefix(pipeline):
    messages = [{"role": "user", "content": [{"type": "text", "text": "x " * 2000}, PICTURE]}]
    prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
    assert prompt.chunks == []
    assert prompt.tokens > 500


async def test_a_picture_that_changes_what_comes_before_it_leaves_no_prefix(tmp_path):
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


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": HELLO, "tools": []},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}, "defer_loading": "yes"}]},
        {"messages": HELLO, "chat_template": "{{ messages }}"},
        {"messages": HELLO, "chat_template_kwargs": [1]},
        {"messages": HELLO, "chat_template_kwargs": {"tools": []}},
        {"messages": HELLO, "continue_final_message": True},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
    ],
)
async def test_prompts_that_cannot_be_read_have_a_length_and_no_chunks(body, pipeline):
    prompt = await prompt_of(pipeline, CHAT, body)
    assert (prompt.chunks, prompt.exact, prompt.ids) == ([], False, b"")
    assert prompt.tokens == max(1, len(json.dumps(body)) // 4)


async def test_nulls_do_not_cost_a_chat_its_exactness(pipeline):
    nulls = dict.fromkeys(["model", "tools", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort"])
    chat = {"messages": [{"role": "user", "content": "x " * 1000}]}
    prompt, same = [await prompt_of(pipeline, CHAT, chat | more) for more in ({}, nulls)]
    assert prompt.exact
    assert prompt.chunks
    assert (same.exact, same.ids, same.chunks) == (prompt.exact, prompt.ids, prompt.chunks)


async def test_a_lone_surrogate_in_arguments_is_left_to_it(tmp_path):
    (save(reference(), tmp_path) / "chat_template.jinja").write_text(template("qwen2").source)
    pipeline = PromptPipeline(config(tmp_path))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert (await prompt_of(pipeline, CHAT, body)).chunks == []
    await pipeline.close()


async def test_ten_thousand_messages_are_no_trouble(pipeline):
    messages = [{"role": "user", "content": "x"}] * 10_000
    prompt = await prompt_of(pipeline, CHAT, {"messages": messages})
    assert prompt.exact


@pytest.mark.parametrize(("text", "inline"), [("short", True), ("long enough " * 2**17, False)])
async def test_a_long_body_is_read_and_rendered_away_from_the_event_loop(pipeline, monkeypatch, text, inline):
    threads = []

    def noting(function):
        def noted(*args):
            threads.append(threading.current_thread())
            return function(*args)

        return noted

    monkeypatch.setattr(module, "parse_request", noting(module.parse_request))
    monkeypatch.setattr(ChatTemplate, "render", noting(ChatTemplate.render))
    body = json.dumps({"messages": [{"role": "a role only here", "content": text}]}).encode()
    prompt = await pipeline.prompt(await pipeline.read(CHAT, body), candidates())
    rendered = f"<|im_start|>a role only here\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(prompt) == reference().encode(rendered).ids
    assert [thread is threading.main_thread() for thread in threads] == [inline, inline]


async def test_json_that_would_take_long_to_read_is_left_to_the_engine(pipeline):
    function = {"name": "f", "parameters": {"x": [0] * 60_000}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(function)}}
    for body in (
        {"messages": HELLO, "tools": tools},
        {"messages": HELLO, "chat_template_kwargs": {"x": tools}},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO]},
    ):
        prompt = await prompt_of(pipeline, CHAT, body)
        assert (prompt.chunks, prompt.exact) == ([], False)


async def test_a_template_that_puts_out_what_is_no_unicode_is_left_to_the_engine(tmp_path):
    (save(reference(), tmp_path) / "chat_template.jinja").write_text(r"{{ '\ud800' }}{{ messages[0].content }}")
    pipeline = PromptPipeline(config(tmp_path))
    prompt = await prompt_of(pipeline, CHAT, {"messages": HELLO})
    assert (prompt.chunks, prompt.exact) == ([], False)
    await pipeline.close()


SHORT = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "messages",
    [
        [SHORT, SHORT | {"content": "NUMBER" + "#@~^" * 10_000 + "\U0001f600"}],
        [SHORT, SHORT | {"content": "NUMBER" + "#@~^" * 10_000}],
        [SHORT | {"task": [[]] * 5000}, SHORT],
    ],
    ids=["wide characters", "a token for each character", "lists in lists"],
)
async def test_what_long_chats_leave_behind_stays_within_the_cache_size(messages):
    limit = 2**22
    pipeline = PromptPipeline(config(segment_cache_bytes=limit))
    await prompt_of(pipeline, CHAT, {"messages": [SHORT, *messages]})
    tracemalloc.start()
    for number in range(100):
        system = {"role": "system", "content": f"{number} is careful. " * 300}
        body = json.dumps({"messages": [system, *messages]}, ensure_ascii=False).replace("NUMBER", str(number))
        await prompt_of(pipeline, CHAT, body.encode())
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await pipeline.close()
    assert held < limit
