"""Anthropic Messages and OpenAI Responses become exactly the prompts that vLLM makes of them."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from tokenizers import AddedToken, processors

from gateway.errors import BadRequest
from gateway.prompt.parsing import parse_request
from gateway.prompt.pipeline import PromptPipeline
from tests.prompt_rig import (
    DATA,
    HELLO,
    MESSAGES,
    RESPONSES,
    SPECIAL_TOKENS,
    TEMPLATE_NAMES,
    api_bodies,
    candidates,
    config,
    ids_of,
    load_json,
    prompt_of,
    reference,
    save,
    template,
    train,
)

RENDERS = load_json(DATA / "apis" / "renders.json")
PATHS = {"messages": MESSAGES, "responses": RESPONSES}
# What vLLM renders, and only vLLM: tools that change within the conversation.
LEFT_TO_THE_ENGINE = {"tool addition"}


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("name", TEMPLATE_NAMES)
async def test_ids_are_those_of_the_text_that_vllm_renders(name, api, tmp_path):
    whole = reference()
    whole.add_special_tokens(list(SPECIAL_TOKENS.values()))  # as the engine does
    (save(whole, tmp_path, SPECIAL_TOKENS) / "chat_template.jinja").write_text(template(name).source)
    pipeline = PromptPipeline(config(tmp_path))
    for body, rendered in RENDERS[name][api].items():
        for _ in range(2):  # reading a body twice changes nothing
            prompt = await prompt_of(pipeline, PATHS[api], api_bodies(api)[body])
        if body in LEFT_TO_THE_ENGINE:
            assert (prompt.chunks, prompt.exact) == ([], False), body
        elif "text" in rendered:
            assert prompt.exact, body
            assert ids_of(prompt) == whole.encode(rendered["text"]).ids, body
    await pipeline.close()


def read(path: str, **fields):
    return parse_request(path, json.dumps(fields).encode())


def test_what_routing_reads_of_a_messages_body():
    request = read(
        MESSAGES, model="m", max_tokens=7, stream=True, cache_salt="s", metadata={"user_id": "u"}, messages=HELLO
    )
    assert (request.kind, request.model, request.max_tokens, request.stream) == ("messages", "m", 7, True)
    assert (request.cache_salt, request.session, request.opaque) == ("s", "u", False)


def test_what_routing_reads_of_a_responses_body():
    request = read(RESPONSES, model="m", max_output_tokens=7, stream=True, cache_salt="s", user="u", input="Hello!")
    assert (request.kind, request.model, request.max_tokens, request.stream) == ("responses", "m", 7, True)
    assert (request.cache_salt, request.session, request.opaque) == ("s", "u", False)
    assert read(RESPONSES, input="Hello!", prompt_cache_key="k", user="u").session == "k"
    assert read(RESPONSES, input="Hello!", session_id="i", prompt_cache_key="k").session == "i"


@pytest.mark.parametrize(
    "stored", [{"previous_response_id": "resp_1"}, {"prompt": {"id": "p"}}, {"previous_input_messages": [{}]}]
)
async def test_what_an_engine_has_stored_is_not_guessed(stored, pipeline):
    prompt = await prompt_of(pipeline, RESPONSES, {"input": "Hello!" * 1000, **stored})
    assert (prompt.chunks, prompt.exact) == ([], False)
    assert prompt.tokens > 1000


async def test_the_same_conversation_has_the_same_chunks_in_every_api(pipeline):
    long = "some words and more of them. " * 100
    turns = [{"role": "user", "content": long}, {"role": "assistant", "content": "Yes."}, *HELLO]
    chunks = {
        tuple((await prompt_of(pipeline, path, body)).chunks)
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": long}, *turns]}),
            (MESSAGES, {"system": long, "messages": turns, "max_tokens": 1}),
            (RESPONSES, {"instructions": long, "input": turns}),
        )
    }
    assert len(chunks) == 1
    assert len(chunks.pop()) > 2


async def test_responses_get_the_special_tokens_of_the_tokenizer_as_in_vllm(tmp_path):
    tokenizer = train("byte-level", [AddedToken("<s>", special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    (save(tokenizer, tmp_path) / "chat_template.jinja").write_text("{{ messages[0].content }}")
    pipeline = PromptPipeline(config(tmp_path))
    responses = await prompt_of(pipeline, RESPONSES, {"input": "Hello!"})
    assert ids_of(responses) == tokenizer.encode("Hello!").ids
    messages = await prompt_of(pipeline, MESSAGES, {"messages": HELLO, "max_tokens": 1})
    assert ids_of(messages) == tokenizer.encode("Hello!", add_special_tokens=False).ids
    await pipeline.close()


async def test_media_end_the_reusable_prefix(pipeline):
    long = {"role": "user", "content": "some words and more of them. " * 200}
    yes = {"role": "assistant", "content": "Yes."}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    anthropic = {"role": "user", "content": [{"type": "image", "source": source}]}
    openai = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    alone = await prompt_of(pipeline, RESPONSES, {"input": [long, yes]})
    for path, body in (
        (MESSAGES, {"messages": [long, yes, anthropic], "max_tokens": 1}),
        (RESPONSES, {"input": [long, yes, openai]}),
    ):
        prompt = await prompt_of(pipeline, path, body)
        assert not prompt.exact
        assert 2 < len(prompt.chunks) <= len(alone.chunks)
        assert prompt.chunks == alone.chunks[: len(prompt.chunks)]


async def test_a_picture_in_a_tool_result_is_a_message_of_the_user(pipeline):
    source = {"type": "url", "url": "https://example.org/cat.png"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    request = read(MESSAGES, messages=[{"role": "user", "content": [result]}], max_tokens=1)
    assert [message.role for message in request.messages] == ["tool", "user"]
    assert not (await pipeline.prompt(request, candidates())).exact


async def test_what_the_engine_may_cut_to_fit_is_not_certain(pipeline):
    whole, *cut = [
        await prompt_of(pipeline, RESPONSES, {"input": "x " * 1000} | more)
        for more in ({"truncation": "disabled"}, {"truncation": "auto"}, {"truncation": None})
    ]
    assert (whole.exact, whole.tokenized) == (True, True)
    for prompt in cut:
        assert (prompt.chunks, prompt.exact, prompt.tokenized) == (whole.chunks, False, False)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": 5}], "input": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}], "input": [{"type": 5}]},
        {"messages": [{"content": "x"}], "input": [{"content": "x"}]},
        {"messages": [], "input": []},
        {"messages": HELLO, "input": HELLO, "tools": 5},
        {"messages": HELLO, "input": HELLO, "tools": [5]},
        {"messages": HELLO, "input": HELLO, "tools": [{"type": "function", "name": 5}]},
        {"messages": HELLO, "input": HELLO, "tools": [{"type": "namespace", "tools": 5}]},
        {
            "messages": HELLO,
            "input": HELLO,
            "tools": [{"type": "function", "name": "f", "input_schema": {}, "strict": "true"}],
        },
        {"messages": HELLO, "input": HELLO, "chat_template_kwargs": [1]},
        {"messages": HELLO, "input": HELLO, "stream": 1},
        {"messages": HELLO, "input": HELLO, "kv_transfer_params": {"prompt_token_ids": [1]}},
        {},
    ],
)
async def test_what_an_engine_might_accept_is_left_to_it(path, body, pipeline):
    prompt = await prompt_of(pipeline, path, body)
    assert (prompt.chunks, prompt.exact) == ([], False)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (MESSAGES, {"messages": "x"}, "messages"),
        (MESSAGES, {"messages": ["x"]}, "messages[0]"),
        (RESPONSES, {"input": 5}, "input"),
        (RESPONSES, {"input": "x", "max_output_tokens": []}, "max_output_tokens"),
    ],
)
def test_what_no_engine_can_read_is_refused(path, body, param):
    with pytest.raises(BadRequest) as caught:
        parse_request(path, json.dumps(body).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_huge_bodies_are_read(path, pipeline):
    many = [{"role": "user", "content": "x"}] * 100_000
    prompt = await prompt_of(pipeline, path, {"messages": many, "input": many, "max_tokens": 1})
    assert prompt.exact
    surrogate = b'{"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": '
    surrogate += b'{"c": "\\ud800"}}]}], "input": [{"role": "user", "content": "\\ud800"}]}'
    with suppress(BadRequest):
        assert not (await prompt_of(pipeline, path, surrogate)).exact
