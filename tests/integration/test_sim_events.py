"""KV events of a simulated worker over real ZMQ sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from sim.server import SimWorker, WorkerSettings
from tests import golden
from tests.sim_clients import TINY, worker_and_client

ANY = "tcp://127.0.0.1:0"
TEXT = "/v1/completions"
IDS = list(range(100, 300))


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def subscribe(context: zmq.asyncio.Context, worker: SimWorker, topic: str = "") -> zmq.asyncio.Socket:
    """Return a subscriber that is known to be subscribed."""
    subscriber = context.socket(zmq.SUB)
    monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    subscriber.subscribe(topic)
    subscriber.connect(worker.publisher.endpoint)
    await monitor.recv_multipart()
    subscriber.disable_monitor()
    await asyncio.sleep(0.1)  # the subscription itself follows the handshake, and nobody says when it arrived
    return subscriber


async def receive(subscriber: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(subscriber.recv_multipart(), 10)


def decode(message: list[bytes]) -> list[dict[str, Any]]:
    return msgspec.msgpack.decode(message[-1])[1]


@asynccontextmanager
async def publishing(
    context: zmq.asyncio.Context, **settings: Any
) -> AsyncIterator[tuple[SimWorker, httpx.AsyncClient, zmq.asyncio.Socket]]:
    async with worker_and_client(**{"kv_events": ANY, "kv_replay": ANY} | settings) as (worker, client):
        yield worker, client, await subscribe(context, worker)


def shape(event: dict[str, Any], names: dict[int, int]) -> dict[str, Any]:
    """An event with its hashes replaced by the order in which they were first mentioned."""

    def name(block_hash: int | None) -> int | None:
        return None if block_hash is None else names.setdefault(block_hash, len(names))

    hashes = [name(block_hash) for block_hash in event.get("block_hashes", [])]
    return event | {"block_hashes": hashes, "parent_block_hash": name(event.get("parent_block_hash"))}


async def assert_published(
    recordings: list[golden.Recorded], client: httpx.AsyncClient, subscriber: zmq.asyncio.Socket, topic: bytes
) -> None:
    """Send recorded requests; what is published must be what the engine published, hashes and times aside."""
    ours: dict[int, int] = {}
    theirs: dict[int, int] = {}
    for recorded in recordings:
        assert (await client.post(recorded.path, json=recorded.body)).status_code == 200
        for captured in recorded.messages:
            message = await receive(subscriber)
            assert message[:2] == [topic, captured.raw[1]]
            published = [shape(event, ours) for event in decode(message)]
            assert published == [shape(event, theirs) for event in captured.events]
            assert [list(event) for event in decode(message)] == [list(event) for event in captured.events]


def scripted(recordings: list[golden.Recorded]) -> Any:
    """A script that gives each request in turn the output that was recorded."""
    remaining = iter(recordings)
    return lambda prompt: next(remaining).output_ids(list(prompt))


async def test_recorded_requests_publish_what_the_engine_published(context):
    recordings = [recorded for recorded in golden.requests() if recorded.path.startswith("/v1/")]
    topic = "kv@127.0.0.1:8101@tiny"
    settings = {"tokenizer": TINY, "block_size": golden.BLOCK_SIZE, "capacity_tokens": 16_383 * golden.BLOCK_SIZE}
    async with publishing(context, **settings, kv_topic=topic, script=scripted(recordings)) as (_, client, subscriber):
        await assert_published(recordings, client, subscriber, topic.encode())


async def test_recorded_evictions_reset_and_replay_are_what_the_engine_sent(context):
    recordings = golden.evictions()
    first, answers = golden.replay()
    topic = answers[0][1]
    settings = {"block_size": golden.BLOCK_SIZE, "capacity_tokens": 63 * golden.BLOCK_SIZE, "kv_topic": topic.decode()}
    async with publishing(context, **settings, script=scripted(recordings)) as (worker, client, subscriber):
        await assert_published(recordings[:-1], client, subscriber, topic)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        last = recordings[-1]
        await client.post(last.path, json=last.body)
        cleared, stored = decode(await receive(subscriber))
        assert cleared == {"type": "AllBlocksCleared"}
        assert stored["token_ids"] == last.messages[0].events[1]["token_ids"]
        frames = await replay(context, worker, first)
    assert [answer[:3] for answer in frames] == [list(answer[:3]) for answer in answers]
    assert frames[-1] == list(answers[-1])


async def replay(context: zmq.asyncio.Context, worker: SimWorker, first: int) -> list[list[bytes]]:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(worker.publisher.replay_endpoint)
    await dealer.send_multipart([b"", first.to_bytes(8, "big")])
    answers = [await receive(dealer)]
    while b"\xff" * 8 not in answers[-1]:
        answers.append(await receive(dealer))
    dealer.close(linger=0)
    return answers


async def test_a_replay_repeats_the_very_payloads(context):
    async with publishing(context) as (worker, client, subscriber):
        for number in range(3):
            await client.post(TEXT, json={"prompt": [number] * 40, "max_tokens": 1})
        published = [await receive(subscriber) for _ in range(3)]
        assert [frames[1:] for frames in await replay(context, worker, 1)][:-1] == published[1:]
        assert len(await replay(context, worker, 0)) == 4
        assert len(await replay(context, worker, 3)) == 1
        assert len(await replay(context, worker, 2**64 - 1)) == 1


async def test_the_older_replay_has_three_frames(context):
    async with publishing(context, replay_format="plain") as (worker, client, _):
        await client.post(TEXT, json={"prompt": [1] * 40, "max_tokens": 1})
        batch, end = await replay(context, worker, 0)
    assert batch[:2] == [b"", bytes(8)]
    assert len(batch) == 3
    assert end == [b"", b"\xff" * 8, b""]


async def test_a_malformed_replay_request_is_ignored(context):
    async with publishing(context) as (worker, _, _):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(worker.publisher.replay_endpoint)
        await dealer.send_multipart([b"only one frame"])
        assert len(await replay(context, worker, 0)) == 1


async def test_the_older_format_has_tagged_arrays(context):
    async with publishing(context, event_format="array") as (_, client, subscriber):
        await client.post(TEXT, json={"prompt": IDS, "max_tokens": 1})
        ((kind, hashes, parent, tokens, block_size, *_),) = decode(await receive(subscriber))
    assert (kind, parent, tokens, block_size) == ("BlockStored", None, IDS[:192], 16)
    assert len(hashes) == 12


async def test_generated_tokens_complete_blocks(context):
    async with publishing(context, script=lambda _: range(1000, 1030)) as (_, client, subscriber):
        await client.post(TEXT, json={"prompt": IDS, "max_tokens": 30})
        events = [*decode(await receive(subscriber)), *decode(await receive(subscriber))]
    assert events[1]["token_ids"] == [*IDS[192:], *range(1000, 1008)]
    assert events[1]["parent_block_hash"] == events[0]["block_hashes"][-1]


async def test_the_host_tier_speaks_of_itself(context):
    settings = {"capacity_tokens": 256, "host_tokens": 512}
    async with publishing(context, **settings) as (_, client, subscriber):
        events = []
        for start in (0, 1000, 2000):
            await client.post(TEXT, json={"prompt": list(range(start, start + 200)), "max_tokens": 1})
            events += decode(await receive(subscriber))
    kinds = {(event["type"], event["medium"]) for event in events}
    assert kinds == {(kind, medium) for kind in ("BlockStored", "BlockRemoved") for medium in ("GPU", "CPU")}


async def test_a_prompt_back_from_host_memory_is_cached_and_stored_again(context):
    async with publishing(context, capacity_tokens=256, host_tokens=4096) as (_, client, subscriber):
        for ids in (IDS, list(range(1000, 1200)), IDS):
            usage = (await client.post(TEXT, json={"prompt": ids, "max_tokens": 1})).json()["usage"]
            events = decode(await receive(subscriber))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 192
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert [(event["medium"], len(event["block_hashes"])) for event in stored] == [("GPU", 9)]  # 3 were still there


async def test_an_adapter_is_named_in_its_events(context):
    async with publishing(context, adapters=("poet",)) as (_, client, subscriber):
        await client.post(TEXT, json={"prompt": IDS, "max_tokens": 1, "model": "poet"})
        (event,) = decode(await receive(subscriber))
    assert (event["lora_name"], event["lora_id"], event["extra_keys"][-1]) == ("poet", 1, ["poet"])


async def test_sources_say_where_to_listen(context):
    async with publishing(context, kv_topic="kv@me") as (worker, client, _):
        source = (await client.get("/kv_event_sources")).json()["0"]
    assert source["endpoint"] == worker.publisher.endpoint
    assert source["replay_endpoint"] == worker.publisher.replay_endpoint
    assert source["topic"] == "kv@me"
    assert not source["endpoint"].endswith(":0")


async def test_a_restarted_worker_counts_from_zero(context):
    async with publishing(context) as (worker, client, subscriber):
        endpoint = worker.publisher.endpoint
        for number in range(2):
            await client.post(TEXT, json={"prompt": [number] * 40, "max_tokens": 1})
            assert (await receive(subscriber))[1] == number.to_bytes(8, "big")
    async with publishing(context, kv_events=endpoint) as (_, client, subscriber):
        await client.post(TEXT, json={"prompt": [0] * 40, "max_tokens": 1})
        assert (await receive(subscriber))[1] == bytes(8)


async def test_a_publisher_may_connect_to_a_bound_subscriber(context):
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe("")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    async with worker_and_client(kv_events=f"tcp://127.0.0.1:{port}", kv_connect=True) as (_, client):
        number, received = 0, None
        while received is None:  # what is published before the connection stands is lost
            number += 1
            assert number < 200
            await client.post(TEXT, json={"prompt": [number] * 40, "max_tokens": 1})
            received = await subscriber.recv_multipart() if await subscriber.poll(50) else None
    assert decode(received)[0]["type"] == "BlockStored"


async def test_a_taken_endpoint_is_named(context):
    async with publishing(context) as (worker, _, _):
        taken = worker.publisher.endpoint
        with pytest.raises(ValueError, match=r"KV event endpoints .* in use"):
            async with SimWorker(WorkerSettings(kv_events=taken)):
                pass
