"""A simulated worker over real sockets, as clients of a vLLM see it."""

from __future__ import annotations

import asyncio
import base64
import math
import socket
import struct
import time

import httpx
import msgspec
import openai
import pytest

from sim.server import SimWorker, WorkerSettings
from sim.tokens import ByteTokenizer
from tests import golden
from tests.sim_clients import DONE, TINY, scrape, stream, until, worker_and_client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Tell me a story about a cache. " * 20}
IDS = list(range(100, 300))


@pytest.fixture
async def served():
    async with worker_and_client() as pair:
        yield pair


async def test_a_chat_stream_has_role_text_finish_and_done(served):
    _, client = served
    role, *chunks, last, done = await stream(client, CHAT, {"model": "tiny", "messages": [USER], "max_tokens": 5})
    assert done == DONE
    assert role["object"] == "chat.completion.chunk"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4
    assert last["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in (role, *chunks, last)}) == 1
    assert all("usage" not in chunk for chunk in (role, *chunks, last))


@pytest.mark.parametrize("folder", [None, TINY], ids=["bytes", "files"])
async def test_a_stream_says_what_a_whole_answer_says(folder):
    async with worker_and_client(tokenizer=folder) as (_, client):
        body = {"messages": [USER], "max_tokens": 12}
        *chunks, _ = await stream(client, CHAT, body)
        whole = (await client.post(CHAT, json=body)).json()
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        assert len(text.split()) == 12


async def test_usage_comes_last_when_asked_for(served):
    _, client = served
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage, done = await stream(client, TEXT, {"prompt": IDS, "max_tokens": 5} | options)
    assert done == DONE
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 200,
        "total_tokens": 205,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_with_every_chunk_when_asked_for(served):
    _, client = served
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, _, _ = await stream(client, TEXT, {"prompt": IDS, "max_tokens": 3} | options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_the_second_turn_finds_the_first_ones_cache():
    async with worker_and_client(tokenizer=TINY) as (_, client):
        first = (await client.post(CHAT, json={"messages": [USER], "max_tokens": 40})).json()
        answer = first["choices"][0]["message"]
        messages = [USER, {"role": "assistant", "content": answer["content"]}, USER]
        second = (await client.post(CHAT, json={"messages": messages, "max_tokens": 4})).json()
    computed = first["usage"]["total_tokens"] - 1  # the last token is sampled, not computed
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_cached_tokens_can_be_left_out():
    async with worker_and_client(prompt_tokens_details=False) as (_, client):
        usage = (await client.post(TEXT, json={"prompt": IDS})).json()["usage"]
    assert usage["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens", "choices"),
    [("abcdefgh", 2, 1), (["abcd", "abcdefgh"], 3, 2), ([1, 2, 3], 3, 1), ([[1, 2, 3], [4, 5]], 5, 2)],
)
async def test_completions_take_texts_and_ids_one_or_several(served, prompt, prompt_tokens, choices):
    _, client = served
    answer = (await client.post(TEXT, json={"prompt": prompt, "max_tokens": 3})).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 3 * choices


async def test_a_stream_of_several_prompts_tells_them_apart(served):
    _, client = served
    body = {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 3}
    whole = (await client.post(TEXT, json=body)).json()
    *chunks, _ = await stream(client, TEXT, body)
    for choice in whole["choices"]:
        texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(texts) == choice["text"]
        assert len(texts) == 3


@pytest.mark.parametrize(("asked", "got"), [({}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": 1_000_000}, 56)])
async def test_an_answer_is_as_long_as_asked_and_as_fits(asked, got):
    async with worker_and_client(capacity_tokens=256) as (_, client):
        answer = (await client.post(TEXT, json={"prompt": IDS} | asked)).json()
    assert answer["usage"]["completion_tokens"] == got
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("included", "after"), [(False, ""), (True, "p f")])
async def test_an_answer_ends_at_the_first_stop_string(included, after):
    answer = ByteTokenizer().encode_text("stop the ship for now").tolist()
    async with worker_and_client(script=lambda _: answer) as (_, client):
        body = {"prompt": "go", "max_tokens": 50, "stop": ["never", "p f"], "include_stop_str_in_output": included}
        whole = (await client.post(TEXT, json=body)).json()
        *chunks, _ = await stream(client, TEXT, body)
    choice, last = whole["choices"][0], chunks[-1]["choices"][0]
    assert choice["text"] == "stop the shi" + after
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (last["finish_reason"], last["stop_reason"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "p f")
    assert len(chunks) == whole["usage"]["completion_tokens"] == 4


async def test_no_stop_string_ends_an_answer_before_its_least_length():
    answer = ByteTokenizer().encode_text("a b c a b c a b c ").tolist()
    async with worker_and_client(script=lambda _: answer) as (_, client):
        body = {"messages": [USER], "stop": "b", "min_tokens": 2}
        choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert choice["message"]["content"] == "a b c a "  # of three tokens; the first has a b, too


@pytest.mark.parametrize("folder", [None, TINY], ids=["bytes", "files"])
async def test_log_probabilities_come_with_every_token(folder):
    async with worker_and_client(tokenizer=folder, stream_interval=3) as (_, client):
        chat = {"messages": [USER], "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
        choice = (await client.post(CHAT, json=chat)).json()["choices"][0]
        streamed = [chunk["choices"][0] for chunk in (await stream(client, CHAT, chat))[1:-1]]
        text = {"prompt": "go", "max_tokens": 8, "logprobs": 2}
        plain = (await client.post(TEXT, json=text)).json()["choices"][0]
        parts = [chunk["choices"][0] for chunk in (await stream(client, TEXT, text))[:-1]]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert [entry for chunk in streamed for entry in chunk["logprobs"]["content"]] == entries
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"] == entry["top_logprobs"][0]["token"]
        assert len({top["token"] for top in entry["top_logprobs"]}) == 3
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) < 1
    logprobs = plain["logprobs"]
    for name, of_all in logprobs.items():
        assert [one for part in parts for one in part["logprobs"][name]] == of_all
    places = zip(logprobs["text_offset"], logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert all(plain["text"].startswith(token, at) and token in tops and len(tops) == 2 for at, token, tops in places)


async def test_a_chat_without_limit_stops_by_itself():
    async with worker_and_client(output_tokens=7) as (_, client):
        answer = (await client.post(CHAT, json={"messages": [USER]})).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_chunks_may_carry_several_tokens():
    async with worker_and_client(stream_interval=4) as (_, client):
        body = {"prompt": IDS, "max_tokens": 9}
        *chunks, _ = await stream(client, TEXT, body)
        whole = (await client.post(TEXT, json=body)).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert 3 <= len(chunks) <= 5


async def test_the_head_of_a_stream_comes_before_its_first_token():
    async with worker_and_client(speed=0.001) as (worker, client):  # the prefill takes a minute
        async with client.stream("POST", TEXT, json={"prompt": IDS, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert len(worker.engine) == 1
        await until(lambda: len(worker.engine) == 0)


async def test_the_request_id_is_the_clients(served):
    _, client = served
    answer = await client.post(TEXT, json={"prompt": IDS}, headers={"x-request-id": 'mine"'})
    assert answer.json()["id"] == 'cmpl-mine"'


async def test_a_salt_and_an_adapter_have_caches_of_their_own():
    async with worker_and_client(adapters=("poet",)) as (_, client):
        hits = []
        for more in ({}, {"cache_salt": "a"}, {"model": "poet"}, {"cache_salt": "a"}, {"model": "poet"}, {}):
            answer = (await client.post(TEXT, json={"prompt": IDS} | more)).json()
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert hits == [0, 0, 0, 192, 192, 192]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        (TEXT, {"model": "nobody", "prompt": "x"}, 404, "model", "The model `nobody` does not exist"),
        (TEXT, {"prompt": list(range(300))}, 400, "input_tokens", "maximum context length is 256 tokens"),
        (TEXT, {"prompt": "x", "n": 2}, 400, "n", "n must be 1"),
        (TEXT, {"prompt": "x", "echo": True}, 400, "echo", "echo is not supported"),
        (TEXT, {"prompt": []}, 400, "prompt", "must be a text"),
        (TEXT, {"prompt": ""}, 400, "prompt", "must not be empty"),
        (TEXT, {"prompt": [1, "x"]}, 400, "prompt", "must be a text"),
        (TEXT, {"prompt": [1, -1]}, 400, "prompt", "Token id -1 is out of vocabulary"),
        (TEXT, {"prompt": [True]}, 400, None, "got `bool`"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "max_tokens must be at least 1, got 0"),
        (CHAT, {"messages": [USER], "max_completion_tokens": 0}, 400, "max_tokens", "must be at least 1, got 0"),
        (TEXT, {"prompt": "x", "stop": ["y", ""]}, 400, None, "stop cannot contain an empty string."),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", "when `stream=True`"),
        (TEXT, {"prompt": "x", "min_tokens": 17}, 400, "min_tokens", "less than or equal to max_tokens=16, got 17"),
        (CHAT, {"messages": [USER], "min_tokens": -1}, 400, "min_tokens", "greater than or equal to 0, got -1"),
        (TEXT, {"prompt": "x", "logprobs": -2}, 400, "logprobs", "must be a positive value"),
        (
            TEXT,
            {"prompt": "x", "logprobs": 21},
            400,
            "logprobs",
            "logprobs of 21, which is greater than max allowed: 20",
        ),
        (CHAT, {"messages": [USER], "top_logprobs": 1}, 400, "top_logprobs", "`logprobs` must be set to true"),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": -1}, 400, "logprobs", "greater than max allowed"),
        (TEXT, {"prompt": "x", "cache_salt": "a/b"}, 400, "cache_salt", "1 to 128 characters"),
        (TEXT, {"messages": []}, 400, None, "prompt"),
        (TEXT, [], 400, None, "Expected `object`"),
        (CHAT, {"messages": "x"}, 400, None, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, 400, None, "content must be"),
        (CHAT, {"messages": [], "continue_final_message": True}, 400, None, "Cannot set both"),
    ],
)
async def test_a_bad_request_is_answered_as_the_engine_does(path, body, status, param, message):
    async with worker_and_client(capacity_tokens=256) as (_, client):
        answer = await client.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert message in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}'])
async def test_a_body_that_is_not_json_is_a_400(served, body):
    _, client = served
    answer = await client.post(TEXT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "Bad Request"


async def test_requests_beyond_the_limit_are_sent_elsewhere():
    async with worker_and_client(max_requests=1, speed=0.001) as (worker, client):
        first = asyncio.ensure_future(client.post(TEXT, json={"prompt": IDS}))
        await until(lambda: len(worker.engine) == 1)
        answer = await client.post(TEXT, json={"prompt": IDS})
        assert answer.status_code == 503
        assert "try again later or on a different instance" in answer.json()["error"]["message"]
        assert (await scrape(client))["vllm:admission_rejections_total", "max_num_queued_reqs"] == 1
        first.cancel()


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(streaming):
    async with worker_and_client(speed=0.001, block_size=16, capacity_tokens=4096) as (worker, _):
        reader, writer = await asyncio.open_connection(*worker.url.removeprefix("http://").split(":"))
        body = msgspec.json.encode({"prompt": IDS, "stream": streaming})
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: worker.engine.worker.cache.usage > 0)
        writer.close()
        await until(lambda: len(worker.engine) == 0)
        assert worker.engine.worker.cache.usage == 0
        assert reader is not None


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue():
    async with worker_and_client(speed=0.001, max_running=1) as (worker, client):
        running, waiting = (asyncio.ensure_future(client.post(TEXT, json={"prompt": IDS})) for _ in range(2))
        await until(lambda: len(worker.engine.worker.waiting) == 1)
        assert (await client.get("/load")).json() == {"server_load": 2}
        waiting.cancel()
        await until(lambda: len(worker.engine) == 1)
        assert len(worker.engine.worker.waiting) == 0
        running.cancel()


async def test_an_aborted_request_is_counted_as_one():
    async with worker_and_client(speed=0.001) as (worker, client):
        request = asyncio.ensure_future(client.post(TEXT, json={"prompt": IDS}))
        await until(lambda: len(worker.engine) == 1)
        request.cancel()
        await until(lambda: len(worker.engine) == 0)
        assert (await scrape(client))["vllm:request_success_total", "abort"] == 1


async def test_many_streams_at_once_all_end():
    async with worker_and_client(speed=200, max_running=8) as (worker, client):
        bodies = [{"prompt": [number] * 50, "max_tokens": 10} for number in range(40)]
        streams = await asyncio.gather(*(stream(client, TEXT, body) for body in bodies))
        assert all(len(events) == 11 and events[-1] == DONE for events in streams)
        assert worker.engine.worker.cache.usage == 0


async def test_a_client_that_reads_late_still_gets_everything():
    loop = asyncio.get_running_loop()
    async with worker_and_client(speed=10_000) as (worker, _):
        with socket.socket() as late:
            late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            late.setblocking(False)
            host, port = worker.url.removeprefix("http://").split(":")
            await loop.sock_connect(late, (host, int(port)))
            body = msgspec.json.encode({"prompt": IDS, "stream": True, "max_tokens": 30_000})
            head = b"POST /v1/completions HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(late, head + body)
            await until(lambda: len(worker.engine) == 1)
            await until(lambda: len(worker.engine) == 0, seconds=30)
            received = bytearray()
            while b"[DONE]" not in received[-100:]:
                received += await asyncio.wait_for(loop.sock_recv(late, 65536), 10)
    assert received.count(b"data: {") == 30_000


async def test_a_long_prompt_is_served_too():
    async with worker_and_client(tokenizer=TINY) as (_, client):
        answer = (await client.post(TEXT, json={"prompt": "def f(x):\n    return x\n" * 2000, "max_tokens": 2})).json()
    assert answer["usage"]["prompt_tokens"] > 10_000


async def test_models_name_length_root_and_parent():
    async with worker_and_client(adapters=("poet",), max_model_len=4096) as (_, client):
        base, adapter = (await client.get("/v1/models")).json()["data"]
    assert (base["id"], base["max_model_len"], base["parent"]) == ("tiny", 4096, None)
    assert (adapter["id"], adapter["parent"]) == ("poet", "tiny")


async def test_tokenize_agrees_with_the_engine():
    recorded = golden.requests()[0]
    async with worker_and_client(tokenizer=TINY, max_model_len=8192) as (_, client):
        assert (await client.post("/tokenize", json=recorded.body)).json() == recorded.response
        text = (await client.post("/tokenize", json={"prompt": "def f", "return_token_strs": True})).json()
    assert text["token_strs"] == ["def", " f"]


async def test_embeddings_are_numbers_or_base64():
    async with worker_and_client() as (_, client):
        body = {"input": ["some text", "other text"]}
        plain = (await client.post("/v1/embeddings", json=body)).json()
        packed = (await client.post("/v1/embeddings", json=body | {"encoding_format": "base64"})).json()
    first, second = (entry["embedding"] for entry in plain["data"])
    assert first != second
    assert list(struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))) == first
    assert plain["usage"]["prompt_tokens"] == 6


async def test_small_questions_have_answers(served):
    _, client = served
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json() == {"version": "0.32.0"}
    assert (await client.get("/kv_event_sources")).json() == {}
    assert (await client.get("/v1/nothing")).status_code == 404
    assert (await client.get(TEXT)).status_code == 405


async def test_a_reset_forgets_the_cache_unless_it_is_in_use():
    async with worker_and_client(speed=1) as (worker, client):
        await client.post(TEXT, json={"prompt": IDS, "max_tokens": 1})
        running = asyncio.ensure_future(client.post(TEXT, json={"prompt": [7] * 50, "max_tokens": 10_000}))
        await until(lambda: worker.engine.worker.cache.usage > 0)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": False}
        running.cancel()
        await until(lambda: worker.engine.worker.cache.usage == 0)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        again = (await client.post(TEXT, json={"prompt": IDS, "max_tokens": 1})).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_metrics_count_what_happened():
    async with worker_and_client(block_size=32, capacity_tokens=32_000, host_tokens=3200) as (_, client):
        for _ in range(2):
            await client.post(TEXT, json={"prompt": IDS, "max_tokens": 5})
        values = await scrape(client)
        text = (await client.get("/metrics")).text
    expected = {
        ("vllm:num_requests_running", ""): 0,
        ("vllm:num_requests_waiting", ""): 0,
        ("vllm:num_requests_waiting_by_reason", "deferred"): 0,
        ("vllm:kv_cache_usage_perc", ""): 0,
        ("vllm:prefix_cache_queries_total", ""): 400,
        ("vllm:prefix_cache_hits_total", ""): 192,
        ("vllm:external_prefix_cache_hits_total", ""): 0,
        ("vllm:prompt_tokens_total", ""): 400,
        ("vllm:prompt_tokens_by_source_total", "local_compute"): 208,
        ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): 192,
        ("vllm:generation_tokens_total", ""): 10,
        ("vllm:num_preemptions_total", ""): 0,
        ("vllm:request_success_total", "length"): 2,
        ("vllm:time_to_first_token_seconds_count", ""): 2,
        ("vllm:inter_token_latency_seconds_count", ""): 8,
        ("vllm:request_queue_time_seconds_count", ""): 2,
        ("vllm:engine_sleep_state", "awake"): 1,
        ("vllm:num_requests_kv_fetch_by_stage", "in_progress"): 0,
        ("vllm:kv_offload_load_bytes_total", ""): 0,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["vllm:kv_offload_cpu_cache_usage_perc", ""] == pytest.approx(0.06)
    assert values["process_start_time_seconds", ""] > 1.6e9
    assert 'block_size="32"' in text
    assert 'num_gpu_blocks="1001"' in text


async def test_metrics_say_how_long_a_busy_machine_kept_the_worker():
    async with worker_and_client(speed=4.0) as (worker, client):
        task = asyncio.ensure_future(client.post(TEXT, json={"prompt": IDS, "max_tokens": 500}))
        await until(lambda: bool(worker.engine.worker.running))  # a step is under way
        time.sleep(0.3)
        (await task).raise_for_status()
        assert (await scrape(client))["kvway_worker_behind_seconds_total", ""] > 0.2


async def test_metrics_show_who_runs_and_who_waits():
    async with worker_and_client(speed=0.001, max_running=1, adapters=("poet",)) as (worker, client):
        posts = [
            asyncio.ensure_future(client.post(TEXT, json={"prompt": IDS, "model": model})) for model in ("poet", "tiny")
        ]
        await until(lambda: len(worker.engine.worker.waiting) == 1)
        values = await scrape(client)
        text = (await client.get("/metrics")).text
        for post in posts:
            post.cancel()
    assert values["vllm:num_requests_running", ""] == 1
    assert values["vllm:num_requests_waiting", ""] == 1
    assert values["vllm:num_requests_waiting_by_reason", "capacity"] == 1
    assert values["vllm:kv_cache_usage_perc", ""] > 0
    assert 'running_lora_adapters="poet"' in text


async def test_every_metric_family_of_the_engine_that_routers_read_is_there():
    families = {"num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"}
    families |= {"prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "num_preemptions"}
    families |= {"prompt_tokens_by_source", "cache_config_info", "engine_sleep_state", "admission_rejections"}
    families |= {"time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds"}
    families |= {"nixl_num_failed_transfers", "nixl_num_kv_expired_reqs", "num_requests_kv_fetch_by_stage"}
    async with worker_and_client() as (_, client):
        text = (await client.get("/metrics")).text
    typed = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE vllm:")}
    assert {f"vllm:{name}" for name in families} <= typed


async def test_the_openai_client_streams_asks_and_fails_as_with_an_engine(served):
    worker, _ = served
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
        parts = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in parts]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        completion = await client.completions.create(model="tiny", prompt="hello", max_tokens=2)
        assert completion.choices[0].finish_reason == "length"
        vectors = await client.embeddings.create(model="tiny", input="hello")
        assert len(vectors.data[0].embedding) == 8
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nobody", messages=messages)
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            await client.chat.completions.create(model="tiny", messages=messages, n=2)


async def test_a_script_decides_the_output():
    async with worker_and_client(tokenizer=TINY, script=lambda prompt: prompt[:3]) as (_, client):
        answer = (await client.post(TEXT, json={"prompt": "def f(x):\n    return", "max_tokens": 8})).json()
    assert answer["choices"][0]["text"] == "def f("
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_taken_port_is_an_error_and_leaves_nothing_behind(served):
    worker, _ = served
    port = int(worker.url.rpartition(":")[2])
    with pytest.raises(OSError, match=f"port {port}: .*in use"):
        async with SimWorker(WorkerSettings(port=port)):
            pass


async def test_two_workers_share_nothing():
    async with worker_and_client() as (_, one), worker_and_client() as (_, other):
        for client in (one, other):
            answer: httpx.Response = await client.post(TEXT, json={"prompt": IDS})
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
