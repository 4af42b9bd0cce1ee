"""The whole gateway before simulated workers, as clients and operators meet it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
import pytest_asyncio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from gateway.config import Config, WorkerConfig
from gateway.fleet.registry import Worker
from sim.server import SimWorker, WorkerSettings
from tests.gateway_rig import FILES, MODEL, STORY, admin_of, fleet, ready, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 16_384


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """One for all tests of the module that do not ask for another."""
    async with fleet(capacity_tokens=CONTEXT) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def admin(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_of(gateway) as client:
        yield client


async def test_the_openai_client_gets_a_whole_chat_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": STORY}], max_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_the_openai_client_gets_a_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": STORY}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def test_the_openai_client_gets_completions_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt=STORY, max_tokens=8)
    stream = await client.completions.create(model=MODEL, prompt=STORY, max_tokens=8, stream=True)
    streamed = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert whole.choices[0].text == streamed


async def test_the_openai_client_gets_token_id_prompts_through(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=list(range(100, 200)), max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 100


async def test_the_openai_client_gets_embeddings_by_load(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model=MODEL, input="a short text")
    assert len(answer.data[0].embedding) > 0


async def test_the_openai_client_sees_the_gateways_errors_as_its_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt="x", extra_body={"stream": "often"})


async def test_the_openai_client_sees_the_workers_errors_as_its_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model=MODEL, prompt=[1] * (CONTEXT + 1), max_tokens=1)


async def test_models_are_listed_once_with_their_cards(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] > 0
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_second_turn_goes_where_the_first_one_went_and_is_predicted(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": STORY}]
    first = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=8)
    messages += [first.parse().choices[0].message.model_dump(include={"role", "content"})]
    messages += [{"role": "user", "content": "And the next ship?"}]
    second = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=8)
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert second.headers["x-kvway-worker"] == first.headers["x-kvway-worker"]
    predicted, cached = int(second.headers["x-kvway-predicted-hit-tokens"]), usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert predicted > 0
    assert abs(predicted - cached) <= 32


async def test_decision_headers_can_be_turned_off() -> None:
    server = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "decision_headers": False}
    async with fleet(1, server=server) as gateway, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        answer = await client.post(url, json={"model": MODEL, "prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-kvway")]


async def test_an_adapter_shares_nothing_with_its_base_model() -> None:
    async with fleet(1, adapters=("poet",)) as gateway, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        predicted = []
        for model in (MODEL, "poet", "poet"):
            answer = await client.post(url, json={"model": model, "prompt": STORY, "max_tokens": 1})
            predicted.append(int(answer.headers["x-kvway-predicted-hit-tokens"]))
        assert predicted[:2] == [0, 0]
        assert predicted[2] > 0


async def test_a_gateway_that_starts_before_its_workers_serves_once_they_are_there(tmp_path: Path) -> None:
    async with SimWorker(WorkerSettings(model=MODEL, tokenizer=FILES, speed=50)) as worker:
        port = int(worker.url.rpartition(":")[2])
    config = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0},
        "workers": [{"url": f"http://127.0.0.1:{port}"}],
        "health": {"interval_s": 0.1},
        "log": {"requests": False, "level": "error"},
    }
    async with Gateway(Config.model_validate(config)) as gateway, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{gateway.port}"
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        assert (await client.get(f"{base}/health")).status_code == 200
        assert (await client.get(f"{base}/ready")).status_code == 503
        refused = await client.post(f"{base}/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
        async with SimWorker(WorkerSettings(model=MODEL, tokenizer=FILES, speed=50, port=port)):
            await until(lambda: bool(ready(gateway)))
            assert (await client.get(f"{base}/ready")).status_code == 200
            assert (await client.post(f"{base}/v1/completions", json=body)).status_code == 200


async def test_explain_shows_every_candidates_terms_and_counts_nothing(
    gateway: Gateway, client: openai.AsyncOpenAI, admin: httpx.AsyncClient
) -> None:
    served = await client.completions.with_raw_response.create(model=MODEL, prompt=STORY, max_tokens=1)
    question = {"model": MODEL, "prompt": STORY}
    explanation = (await admin.post("/admin/explain", json=question)).json()
    assert explanation["worker"] == served.headers["x-kvway-worker"]
    assert explanation["expected_hit_tokens"] > 0
    assert {row["worker"] for row in explanation["candidates"]} == {"worker-0", "worker-1"}
    chosen = next(row for row in explanation["candidates"] if row["chosen"])
    assert {"cost", "wait_s", "work_s", "pi", "displacement_s", "hbm_tokens"} <= chosen.keys()
    assert gateway.ledger.in_flight == 0
    assert (await admin.post("/admin/explain", json=question)).json()["worker"] == explanation["worker"]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[]", 400), (b"", 400), (b'{"model":"other","prompt":"x"}', 404)]
)
async def test_explain_refuses_what_the_gateway_would_refuse(
    admin: httpx.AsyncClient, body: bytes, status: int
) -> None:
    answer = await admin.post("/admin/explain", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_metrics_are_valid_and_count_requests_by_worker(
    client: openai.AsyncOpenAI, admin: httpx.AsyncClient
) -> None:
    async def families() -> dict[str, Metric]:
        text = (await admin.get("/metrics")).text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def requests(families: dict[str, Metric]) -> float:
        return sum(sample.value for sample in families["kvway_requests"].samples if sample.name.endswith("_total"))

    await client.completions.create(model=MODEL, prompt=STORY, max_tokens=1)
    before = requests(await families())
    await client.completions.create(model=MODEL, prompt=STORY, max_tokens=1)
    after = await families()
    assert requests(after) == before + 1
    assert after["kvway_in_flight_requests"].samples[0].value == 0
    assert {sample.labels["worker"] for sample in after["kvway_kv_events"].samples} == {"worker-0", "worker-1"}


async def test_either_port_says_where_else_to_look(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as public:
        missed = await public.get("/metrics")
        wrong = await public.post("/health")
    message = "There is nothing at /metrics. Inference is under /v1/, metrics and /admin on the admin port"
    assert (missed.status_code, missed.json()["error"]["message"]) == (404, f"{message} (server.admin_port).")
    assert (wrong.status_code, sorted(wrong.headers["allow"].split(", "))) == (405, ["GET", "HEAD"])
    message = "There is nothing at /v1/models. This is the admin port; /docs shows what it has."
    assert (await admin.get("/v1/models")).json()["error"]["message"] == message


async def test_a_drained_worker_gets_no_new_requests(
    gateway: Gateway, client: openai.AsyncOpenAI, admin: httpx.AsyncClient
) -> None:
    assert (await admin.post("/admin/workers/worker-0/drain")).json()["state"] == "draining"
    for number in range(4):
        answer = await client.completions.with_raw_response.create(
            model=MODEL, prompt=f"{number} {STORY}", max_tokens=1
        )
        assert answer.headers["x-kvway-worker"] == "worker-1"
    assert (await admin.post("/admin/workers/worker-0/undrain")).json()["state"] == "starting"
    await until(lambda: len(ready(gateway)) == 2)
    assert (await admin.post("/admin/workers/nobody/drain")).status_code == 404


async def test_a_worker_of_any_name_can_be_drained(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    name = "a/b?c%d"
    gateway.registry.add(Worker.from_config(WorkerConfig(url="http://127.0.0.1:1", name=name)))
    for verb, state in (("drain", "draining"), ("undrain", "starting")):
        answer = await admin.post(f"/admin/workers/{quote(name, safe='')}/{verb}")
        assert (answer.json()["name"], answer.json()["state"]) == (name, state)
    gateway.registry.remove(name)


async def test_the_admin_config_shows_no_password() -> None:
    config = Config.model_validate({"index": {"url": "redis://user:secret@127.0.0.1:1/0"}})
    assert "secret" not in str(config.masked())


async def test_a_restarted_worker_without_events_is_known_anew_by_what_is_sent_to_it() -> None:
    """Its new incarnation may get the slot number of the old one, whose model must not be believed."""
    async with SimWorker(WorkerSettings(model=MODEL, tokenizer=FILES, speed=50)) as worker:
        config = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0},
            "workers": [{"url": worker.url}],
            "models": {MODEL: {"tokenizer": str(FILES)}},
            "prompt": {"chunk_tokens": 32},
            "index": {"speculative_ttl_s": 0},
            "log": {"requests": False, "level": "error"},
        }
        async with Gateway(Config.model_validate(config)) as gateway, httpx.AsyncClient() as client:
            await until(lambda: bool(ready(gateway)))

            async def predicted() -> int:
                body = {"model": MODEL, "prompt": STORY, "max_tokens": 1}
                answer = await client.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body)
                return int(answer.headers["x-kvway-predicted-hit-tokens"])

            assert await predicted() == 0
            known = await predicted()
            (entry,) = gateway.registry.workers.values()
            for _ in range(2):  # the first slot is swept, and so free again, by the second time
                slot = entry.slot
                gateway.feeds.restarted(entry)
                await until(lambda slot=slot: entry.slot not in (-1, slot))
                assert await predicted() == 0
                assert await predicted() == known > 0


async def test_lmcache_servers_may_tell_the_admin_port_what_they_hold(admin: httpx.AsyncClient) -> None:
    key = {"chunk_hash_hex": "3c", "model_name": MODEL}
    entries = [{"key": key, "token_ids": [1] * 32, "token_offset": 0}]
    batch = {"instance_id": "worker-0", "incarnation": 1, "seq": 1, "event_type": "store", "entries": entries}
    async with asyncio.timeout(15):
        while True:  # until the worker's own events are followed
            answer = await admin.post("/lmcache/events", json={"batches": [batch, batch | {"instance_id": "nobody"}]})
            if answer.json() != {"batches": 0, "ignored": 2}:
                break
            await asyncio.sleep(0.05)
    assert (answer.status_code, answer.json()) == (200, {"batches": 1, "ignored": 1})
    refused = await admin.post("/lmcache/events", json={"batches": 3})
    assert refused.status_code == 400
    assert "LMCache" in refused.json()["error"]["message"]


async def test_a_gateway_that_is_ready_has_imported_what_httpx_needs_for_its_first_request() -> None:
    # In a process of its own: this one has long used httpx.
    program = """
import asyncio, sys
from gateway.app import Gateway
from gateway.config import Config

async def main():
    server = {"host": "127.0.0.1", "port": 0, "admin_port": 0}
    config = {"server": server, "workers": [{"url": "http://127.0.0.1:1"}]}
    async with Gateway(Config.model_validate(config)):
        print("anyio._backends._asyncio" in sys.modules)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert said.split()[-1:] == [b"True"]


async def test_a_gateway_that_nobody_gave_workers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = {"server": {"host": "127.0.0.1", "port": 0, "admin_port": 0}}
    async with Gateway(Config.model_validate(config)):
        assert "no workers are configured" in caplog.text
