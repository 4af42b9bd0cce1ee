"""Faults on demand, and a worker as a process of its own."""

from __future__ import annotations

import asyncio
import re
import signal
from asyncio.subprocess import PIPE

import httpx
import msgspec
import pytest

from sim.server import Fault, SimWorker, WorkerSettings
from tests.processes import kvway
from tests.sim_clients import DONE, scrape, stream, until, worker_and_client

TEXT = "/v1/completions"
BODY = {"prompt": [1] * 50, "max_tokens": 20}


async def begin(client: httpx.AsyncClient, kind: str, **details: float) -> None:
    answer = await client.post("/sim/fault", json={"kind": kind, **details})
    assert (answer.status_code, answer.json()) == (200, {"kind": kind})


async def test_a_dead_worker_resets_its_connections_and_refuses_new_ones():
    async with worker_and_client(speed=0.001, kv_events="tcp://127.0.0.1:0") as (worker, client):
        request = asyncio.ensure_future(client.post(TEXT, json=BODY))
        await until(lambda: len(worker.engine) == 1)
        await begin(client, "die")
        with pytest.raises(httpx.TransportError):
            await request
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        assert worker.died.is_set()


async def test_a_worker_on_a_dead_ones_port_has_a_new_life():
    async with worker_and_client() as (worker, client):
        await client.post(TEXT, json=BODY)
        started = (await scrape(client))["process_start_time_seconds", ""]
        await begin(client, "die")
        port = int(worker.url.rpartition(":")[2])
        async with worker_and_client(port=port) as (_, again):
            answer = await again.post(TEXT, json=BODY)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert (await scrape(again))["process_start_time_seconds", ""] > started


async def test_a_hanging_worker_answers_nothing_until_it_is_over():
    async with worker_and_client() as (worker, client):
        await begin(client, "hang")
        waiting = [asyncio.ensure_future(client.get("/health")), asyncio.ensure_future(client.post(TEXT, json=BODY))]
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert not done
        assert len(worker.engine) == 0
        await begin(client, "none")
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]


async def test_streams_stand_still_while_a_worker_hangs():
    async with worker_and_client(speed=1) as (worker, client):
        running = asyncio.ensure_future(stream(client, TEXT, BODY | {"max_tokens": 8}))
        await until(lambda: any(request.generated for request in worker.engine.worker.running))
        await begin(client, "hang")
        (request,) = worker.engine.worker.running
        generated = request.generated
        done, _ = await asyncio.wait([running], timeout=0.1)
        assert not done
        assert request.generated == generated
        await begin(client, "none")
        assert (await running)[-1] == DONE


async def test_a_hang_ends_after_its_seconds():
    async with worker_and_client() as (_, client):
        await begin(client, "hang", seconds=0.05)
        assert (await client.get("/health")).status_code == 200


async def test_a_worker_that_hangs_can_be_closed():
    async with worker_and_client() as (_, client):
        await begin(client, "hang")
        waiting = asyncio.ensure_future(client.get("/health"))
        await asyncio.sleep(0)
    with pytest.raises(httpx.TransportError):
        await waiting


async def test_refusals_meet_as_many_inference_requests_as_they_count():
    async with worker_and_client() as (_, client):
        await begin(client, "error503", count=2)
        assert (await client.get("/health")).status_code == 200
        answers = [await client.post(TEXT, json=BODY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    assert answers[0].json()["error"]["type"] == "Service Unavailable"


@pytest.mark.parametrize("speed", [1.0, 1000.0], ids=["token by token", "all at once"])
async def test_a_cut_stream_delivers_so_many_tokens_and_no_done(speed: float):
    async with worker_and_client(speed=speed) as (worker, client):
        await begin(client, "cut", count=1, after_tokens=2)
        received = b""
        with pytest.raises(httpx.TransportError):
            async with client.stream("POST", TEXT, json=BODY | {"stream": True}) as response:
                async for data in response.aiter_raw():
                    received += data
        assert received.count(b"data: {") == 2
        assert b"[DONE]" not in received
        await until(lambda: len(worker.engine) == 0)
        assert worker.engine.worker.cache.usage == 0
        assert (await stream(client, TEXT, BODY))[-1] == DONE


async def test_a_slow_worker_takes_longer_for_every_token():
    async with worker_and_client() as (_, client):
        await client.post(TEXT, json=BODY)
        quick = (await scrape(client))["vllm:inter_token_latency_seconds_sum", ""]
        await begin(client, "slow", factor=3)
        await client.post(TEXT, json=BODY)
        both = (await scrape(client))["vllm:inter_token_latency_seconds_sum", ""]
    assert both - quick > 2 * quick


async def test_faults_may_hold_from_the_start():
    async with worker_and_client(faults=(Fault("error503"),)) as (_, client):
        assert (await client.post(TEXT, json=BODY)).status_code == 503


@pytest.mark.parametrize("fault", [{"kind": "nap"}, {}, {"kind": "slow", "factor": 0}, {"kind": "hang", "second": 1}])
async def test_an_unknown_fault_is_a_400(fault):
    async with worker_and_client() as (_, client):
        assert (await client.post("/sim/fault", json=fault)).status_code == 400


async def test_nothing_of_a_worker_is_left_when_it_is_closed():
    worker = SimWorker(WorkerSettings(kv_events="tcp://127.0.0.1:0", kv_replay="tcp://127.0.0.1:0"))
    before = asyncio.all_tasks()
    async with worker, httpx.AsyncClient() as client:
        assert (await client.get(f"{worker.url}/health")).status_code == 200
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(("end", "code"), [("signal", 0), ("die", 1)])
async def test_a_process_says_where_it_serves_and_ends_with_a_code_that_says_how(end, code):
    command = kvway("worker", "--port", "0", "--kv-events", "tcp://127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    said = re.fullmatch(r"kvway worker: sim at (http://127.0.0.1:\d+), KV events at tcp://127.0.0.1:\d+\n", line)
    assert said, line
    url = said[1]
    if end == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        async with httpx.AsyncClient() as client:
            await client.post(f"{url}/sim/fault", content=msgspec.json.encode({"kind": "die"}))
    _, errors = await asyncio.wait_for(process.communicate(), 10)
    assert (process.returncode, errors) == (code, b"")
