"""Prefill and decode on two workers: what each is sent, and how the two legs end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from time import monotonic
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from gateway.fleet.registry import State
from gateway.observe.record import Outcome
from tests.pd_rig import (
    ALWAYS,
    AT_ONCE_S,
    BODIES,
    CHAT,
    ask,
    body_of,
    counted,
    handovers,
)
from tests.peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeWorker,
    Message,
    Wire,
    chunk,
    event,
    eventually,
    request,
    response,
)
from tests.peers import answer as answers
from tests.processes import free_ports
from tests.relay_rig import MODEL, Rig, relay

NIXL_PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_port":5601,"x_new":{"a":[1.50]}}'
ROLES = [{"role": "prefill"}, {"role": "decode"}]
SPOOFED = {"bootstrap_host": "evil", "bootstrap_room": 1, "kv_transfer_params": {"remote_host": "evil"}}
PREFILLED = response(b'{"usage":{"prompt_tokens":9},"kv_transfer_params":%b}' % NIXL_PARAMS)
STREAM = (STREAM_HEAD, chunk(event("one")), chunk(DONE), LAST_CHUNK)


async def test_nixl_legs_are_what_vllm_expects() -> None:
    fields = {
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "min_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "x_unknown": [1.5],
    }
    async with (
        FakeWorker(answers(PREFILLED)) as prefill,
        FakeWorker(answers(b"".join(STREAM))) as decode,
        relay([prefill, decode], settings=ROLES, disaggregation=ALWAYS) as rig,
    ):
        message = await ask(rig, CHAT, **fields, **SPOOFED)
        assert message.raw_body == b"".join(STREAM[1:])
        await rig.settled()
    first, second = prefill.requests[0], decode.requests[0]
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    sent = {"model": MODEL, **BODIES[CHAT], **fields}
    asked = msgspec.json.decode(first.body)
    assert asked.pop("kv_transfer_params") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    expected = sent | {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    del expected["stream_options"], expected["min_tokens"]
    assert asked == expected
    assert NIXL_PARAMS in second.body
    asked = msgspec.json.decode(second.body)
    assert asked.pop("kv_transfer_params") == msgspec.json.decode(NIXL_PARAMS)
    assert asked == sent


async def test_a_prefill_is_no_part_of_the_time_that_a_decision_takes() -> None:
    async def prefills(wire: Wire, _: Message) -> None:
        asked_at.append(monotonic())
        wire.send(PREFILLED)

    asked_at: list[float] = []
    async with (
        FakeWorker(prefills) as prefill,
        FakeWorker(answers(response())) as decode,
        relay([prefill, decode], settings=ROLES, disaggregation=ALWAYS) as rig,
    ):
        assert (await ask(rig, CHAT)).status == 200
        assert (await rig.settled()).routed_at <= asked_at[0]


async def test_sglang_legs_meet_in_one_room_per_sequence() -> None:
    settings = [one | {"pd": "sglang", "bootstrap_port": 8997} for one in ROLES]

    async def follows(wire: Wire, _: Message) -> None:
        await eventually(lambda: len(prefill.requests) == len(decode.requests))
        wire.send(response())

    async with (
        FakeWorker(answers(response())) as prefill,
        FakeWorker(follows) as decode,
        relay([prefill, decode], settings=settings) as rig,
    ):
        for n in (1, 3):
            assert (await ask(rig, CHAT, n=n, **SPOOFED)).status == 200
            await rig.settled()
    for (first, second), n in zip(zip(prefill.requests, decode.requests, strict=True), (1, 3), strict=True):
        assert first.body == second.body
        asked = msgspec.json.decode(first.body)
        rooms = asked.pop("bootstrap_room")
        where = asked.pop("bootstrap_host"), asked.pop("bootstrap_port")
        assert where == (("127.0.0.1", 8997) if n == 1 else (["127.0.0.1"] * n, [8997] * n))
        rooms = [rooms] if n == 1 else rooms
        assert len(set(rooms)) == n and all(0 <= room < 2**63 for room in rooms)
        assert asked == {"model": MODEL, **BODIES[CHAT], "n": n}


async def test_sglangs_decode_worker_is_told_which_data_parallel_rank_prefills() -> None:
    settings = [one | {"pd": "sglang", "data_parallel_rank": rank} for rank, one in enumerate(ROLES, start=2)]
    async with (
        FakeWorker(answers(response())) as prefill,
        FakeWorker(answers(response())) as decode,
        relay([prefill, decode], settings=settings) as rig,
    ):
        assert (await ask(rig, CHAT)).status == 200
        await rig.settled()
    [asked] = decode.requests
    assert asked.headers["x-data-parallel-rank"] == "3"
    assert msgspec.json.decode(asked.body)["disagg_prefill_dp_rank"] == 2


@asynccontextmanager
async def lmcache_pair(
    ranks: int, notices: Sequence[bytes], decodes: Sequence[bytes] = (b"",), **disaggregation: Any
) -> AsyncIterator[tuple[Rig, FakeWorker, list[FakeWorker]]]:
    """A relay before a prefill worker that pushes ``notices``, ``ID`` replaced, once it has answered."""
    (port,) = free_ports(1)

    async def prefills(wire: Wire, message: Message) -> None:
        spec = msgspec.json.decode(message.body)["kv_transfer_params"]["disagg_spec"]
        wire.send(response(b'{"usage":{"prompt_tokens":9}}'))
        for notice in notices:
            await push.send(notice.replace(b"ID", spec["req_id"].encode()))

    ports = {"lmcache_init_ports": [7300] * ranks, "lmcache_alloc_ports": [7400] * ranks}
    settings = [{"role": "prefill", "pd": "lmcache"}]
    settings += [{"role": "decode", "pd": "lmcache", **ports}] * len(decodes)
    endpoint = f"tcp://127.0.0.1:{port}"
    config = {"policy": "always", "lmcache_bind": endpoint, **disaggregation}
    async with AsyncExitStack() as stack:
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, 0)
        push = context.socket(zmq.PUSH)
        push.connect(endpoint)
        prefill = await stack.enter_async_context(FakeWorker(prefills))
        scripts = [answers(body) if body else (lambda wire, _: hang_up(wire)) for body in decodes]
        decoding = [await stack.enter_async_context(FakeWorker(script)) for script in scripts]
        rig = await stack.enter_async_context(relay([prefill, *decoding], settings=settings, disaggregation=config))
        yield rig, prefill, decoding


async def hang_up(wire: Wire) -> None:
    wire.reset()


WRITTEN = msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "x" * 37}).replace(b"x" * 37, b"ID")  # as long


async def test_lmcache_legs_are_what_it_expects_and_the_second_waits_until_every_rank_has_written() -> None:
    noise = [
        b"no msgpack",
        b"\x81\xa1a" + b"\x91" * 10_000,
        msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": "another"}),
    ]
    fields = {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    async with lmcache_pair(2, [WRITTEN, *noise, WRITTEN], (b"".join(STREAM),)) as (rig, prefill, (decode,)):
        message = await ask(rig, CHAT, **fields, **SPOOFED)
        assert message.raw_body == b"".join(STREAM[1:])
        await rig.settled()
        assert handovers(rig) == counted("w0", "w1", "completed")
    sent = {"model": MODEL, **BODIES[CHAT], **fields}
    assert msgspec.json.decode(decode.requests[0].body) == sent
    asked = msgspec.json.decode(prefill.requests[0].body)
    params = asked.pop("kv_transfer_params")
    assert params["disagg_spec"].pop("req_id").startswith("xfer-")
    where = {"receiver_host": "127.0.0.1", "receiver_init_port": [7300] * 2, "receiver_alloc_port": [7400] * 2}
    assert params == {"ret_first_tok": True, "disagg_spec": where}
    expected = sent | {"max_tokens": 1, "stream": False}
    del expected["stream_options"]
    assert asked == expected


async def test_kv_that_lmcache_has_not_written_in_time_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async with lmcache_pair(2, [WRITTEN], (response(),), lease_s=0.05) as (rig, _, (decode,)):
        assert (await ask(rig, CHAT)).status == 200
        assert (await rig.settled()).reason != "apart"
        assert handovers(rig) == counted("w0", "", "prefill_failed")
        assert len(decode.requests) == 1
        assert "pd_proxy_host" in caplog.text


async def test_what_lmcache_has_written_to_a_worker_that_fails_is_written_to_another() -> None:
    async with lmcache_pair(1, [WRITTEN], (b"", response())) as (rig, prefill, decodes):
        assert (await ask(rig, CHAT)).status == 200
        await rig.settled()
        assert [len(one.requests) for one in (prefill, *decodes)] == [2, 1, 1]
        assert handovers(rig) == counted("w0", "w1", "decode_failed") | counted("w0", "w2", "completed")


async def test_without_notices_lmcaches_answer_says_that_kv_is_written() -> None:
    async with lmcache_pair(1, [], (response(),), lmcache_bind=None) as (rig, _, _):
        assert (await ask(rig, CHAT)).status == 200
        assert (await rig.settled()).reason == "apart"


class Patient:
    """A worker's script that says nothing, and notices when the gateway gives up."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, wire: Wire, _: Message) -> None:
        self.asked.set()
        await wire.gone()
        self.given_up.set()


@asynccontextmanager
async def patient_pair(pd: str, prefill: Any, decode: Any) -> AsyncIterator[Rig]:
    settings = [one | {"pd": pd} for one in ROLES]
    once = {"retries": {"max_attempts": 1}}
    async with (
        FakeWorker(prefill) as first,
        FakeWorker(decode) as second,
        relay([first, second], settings=settings, disaggregation=ALWAYS, **once) as rig,
    ):
        yield rig


async def test_a_client_that_leaves_takes_both_legs_along() -> None:
    prefill, decode = Patient(), Patient()
    async with patient_pair("sglang", prefill, decode) as rig:
        async with rig.connect() as client:
            client.send(request(body_of(CHAT)))
            await prefill.asked.wait()
            await decode.asked.wait()
        async with asyncio.timeout(AT_ONCE_S):
            await prefill.given_up.wait()
            await decode.given_up.wait()
        assert await rig.outcome() is Outcome.CLIENT_GONE
        assert rig.blamed == []
        assert handovers(rig) == counted("w0", "w1", "cancelled")


async def test_kv_that_is_left_behind_is_counted() -> None:
    decode = Patient()
    async with patient_pair("nixl", answers(PREFILLED), decode) as rig:
        async with rig.connect() as client:
            client.send(request(body_of(CHAT)))
            await decode.asked.wait()
        async with asyncio.timeout(AT_ONCE_S):
            await decode.given_up.wait()
        assert await rig.outcome() is Outcome.CLIENT_GONE
        assert handovers(rig) == counted("w0", "w1", "abandoned")


async def test_a_client_that_leaves_during_the_prefill() -> None:
    prefill = Patient()
    async with patient_pair("nixl", prefill, Patient()) as rig:
        async with rig.connect() as client:
            client.send(request(body_of(CHAT)))
            await prefill.asked.wait()
        async with asyncio.timeout(AT_ONCE_S):
            await prefill.given_up.wait()
        assert await rig.outcome() is Outcome.CLIENT_GONE
        assert rig.blamed == []
        assert handovers(rig) == counted("w0", "", "cancelled")


@pytest.mark.parametrize("pd", ["nixl", "mooncake"])
async def test_what_a_prefill_worker_nests_too_deeply_to_read_hands_nothing_over(pd: str) -> None:
    nested = answers(response(b'{"kv_transfer_params":%b%b}' % (b"[" * 10_000, b"]" * 10_000)))
    async with FakeWorker(nested) as prefill, FakeWorker(answers(response())) as decode:
        settings = [one | {"pd": pd, "bootstrap_port": prefill.port} for one in ROLES]
        async with relay([prefill, decode], settings=settings, disaggregation=ALWAYS) as rig:
            assert (await ask(rig, CHAT)).body == b"{}"
            await rig.settled()
            assert handovers(rig) == counted("w0", "", "prefill_failed")


async def test_requests_that_come_together_ask_a_prefill_worker_once_who_it_is() -> None:
    waiting = 3

    async def answers_late(wire: Wire, _: Message) -> None:
        await eventually(lambda: rig.services.hand_overs._decisions["apart"] == waiting)
        wire.send(response(b'{"0":{"engine_id":"prefill-engine"}}'))

    async with (
        FakeWorker(answers_late) as server,
        FakeWorker(answers(response())) as prefill,
        FakeWorker(answers(response())) as decode,
    ):
        settings = [one | {"pd": "mooncake", "bootstrap_port": server.port} for one in ROLES]
        async with relay([prefill, decode], settings=settings, disaggregation=ALWAYS) as rig:
            asking = [asyncio.ensure_future(ask(rig, CHAT)) for _ in range(waiting)]
            assert {message.status for message in await asyncio.gather(*asking)} == {200}
            await rig.settled()
    assert len(server.requests) == 1
    assert all(b"prefill-engine" in message.body for message in decode.requests)


async def test_a_client_that_leaves_while_the_prefill_worker_is_asked_who_it_is() -> None:
    bootstrap = Patient()
    async with FakeWorker(bootstrap) as server, FakeWorker(Patient()) as prefill, FakeWorker(Patient()) as decode:
        settings = [one | {"pd": "mooncake", "bootstrap_port": server.port} for one in ROLES]
        async with relay([prefill, decode], settings=settings, disaggregation=ALWAYS) as rig:
            async with rig.connect() as client:
                client.send(request(body_of(CHAT)))
                await bootstrap.asked.wait()
            assert await rig.outcome() is Outcome.CLIENT_GONE


@pytest.mark.parametrize("dying", ["prefill", "decode"])
@pytest.mark.parametrize("pd", ["sglang", "mooncake"])
async def test_a_leg_that_fails_has_the_other_cancelled_within_100_ms(pd: str, dying: str) -> None:
    other = Patient()

    async def dies(wire: Wire, _: Message) -> None:
        await other.asked.wait()
        wire.reset()

    scripts = (dies, other) if dying == "prefill" else (other, dies)
    async with patient_pair(pd, *scripts) as rig:
        rig.services.hand_overs._engines[rig.services.registry.workers["w0"]] = "engine", inf  # nobody is to be asked
        asked = asyncio.ensure_future(ask(rig, CHAT))
        await other.asked.wait()
        async with asyncio.timeout(AT_ONCE_S):
            await other.given_up.wait()
        assert (await asked).status == 502
        assert await rig.outcome() is Outcome.UPSTREAM_FAILED
        assert rig.blamed == [("w0" if dying == "prefill" else "w1", "reset")]


async def test_a_leg_that_fails_is_noticed_after_an_answer_that_was_cut_before_its_client_saw_it() -> None:
    """An answer that is not streamed is kept until it is complete, and may be lost until then."""
    others = [Patient(), Patient()]

    async def prefills(wire: Wire, message: Message) -> None:
        if len(prefill.requests) == 1:
            await others[0](wire, message)
        else:
            await others[1].asked.wait()
            wire.reset()

    async def decodes(wire: Wire, message: Message) -> None:
        if len(decode.requests) == 1:
            await others[0].asked.wait()
            await wire.send_slowly(response(b'{"usage":{}}')[:-5])
            wire.reset()
        else:
            await others[1](wire, message)

    settings = [one | {"pd": "sglang"} for one in ROLES]
    retries = {"max_attempts": 2, "backoff_s": 0.001}
    async with (
        FakeWorker(prefills) as prefill,
        FakeWorker(decodes) as decode,
        relay([prefill, decode], settings=settings, retries=retries) as rig,
    ):
        assert (await ask(rig, CHAT)).status == 502
        await rig.settled()
        assert rig.blamed == [("w1", "reset"), ("w0", "reset")]


async def test_sglangs_mixed_workers_answer_what_those_of_one_role_cannot() -> None:
    settings = [{"role": role, "pd": "sglang"} for role in ("prefill", "decode", "mixed")]
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(answers(response()))) for _ in settings]
        rig = await stack.enter_async_context(relay(workers, settings=settings))
        for _ in range(3):
            assert (await ask(rig, CHAT, echo=True)).status == 200
        assert [len(worker.requests) for worker in workers] == [0, 0, 3]
        for _ in range(3):  # nobody hands over to a mixed one
            assert (await ask(rig, CHAT)).status == 200
        assert len(workers[1].requests) == 3
        await rig.settled()
        registry = rig.services.registry
        registry.set_state(registry.workers["w0"], State.DRAINING)
        for _ in range(3):
            assert (await ask(rig, CHAT)).status == 200
        assert len(workers[2].requests) == 6
        await rig.settled()


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
NOT_LOADED = b'data: {"error":{"message":"Internal server error","type":"InternalServerError","code":500}}\n\n'


@asynccontextmanager
async def decoding(*streams: Sequence[bytes]) -> AsyncIterator[tuple[Rig, list[FakeWorker]]]:
    """A relay before a prefill worker and decode workers, each of which sends a stream in pieces, and hangs up."""
    async with AsyncExitStack() as stack:

        def sends(pieces: Sequence[bytes]) -> Any:
            async def script(wire: Wire, _: Message) -> None:
                await wire.send_slowly(STREAM_HEAD, *pieces)
                wire.reset()

            return script

        workers = [await stack.enter_async_context(FakeWorker(answers(PREFILLED)))]
        workers += [await stack.enter_async_context(FakeWorker(sends(pieces))) for pieces in streams]
        settings = [ROLES[0], *[ROLES[1]] * len(streams)]
        retries = {"backoff_s": 0.001}
        rig = await stack.enter_async_context(relay(workers, settings=settings, disaggregation=ALWAYS, retries=retries))
        yield rig, workers[1:]


@pytest.mark.parametrize("before", [b"", b": ping\n\n", ROLE], ids=["at once", "after a comment", "after the role"])
async def test_a_stream_that_is_but_an_error_is_none_and_the_prompt_is_computed(before: bytes) -> None:
    failing = [chunk(before)] * bool(before) + [chunk(NOT_LOADED), chunk(DONE), LAST_CHUNK]
    async with decoding(failing, STREAM[1:]) as (rig, decodes):
        message = await ask(rig, CHAT, stream=True)
        assert message.raw_body == b"".join(STREAM[1:])
        record = await rig.settled()
        assert (record.attempts, record.worker, record.reason == "apart") == (2, "w2", False)
        assert rig.blamed == []
        assert handovers(rig) == counted("w0", "w1", "decode_failed")
        assert b"kv_transfer_params" not in decodes[1].requests[0].body


@pytest.mark.parametrize(
    "pieces",
    [
        (chunk(ROLE), chunk(event("one")), chunk(NOT_LOADED), chunk(DONE), LAST_CHUNK),
        (chunk(ROLE), chunk(DONE), LAST_CHUNK),
        (chunk(ROLE)[:40], chunk(ROLE)[40:], LAST_CHUNK),
        (chunk(b"data: " + b"x" * 70_000), LAST_CHUNK),
        (LAST_CHUNK,),
    ],
    ids=["error later", "no token", "role only", "one long event", "nothing"],
)
async def test_any_other_stream_passes_as_it_comes(pieces: Sequence[bytes]) -> None:
    async with decoding(pieces) as (rig, _):
        assert (await ask(rig, CHAT, stream=True)).raw_body == b"".join(pieces)
        await rig.settled()
        assert handovers(rig) == counted("w0", "w1", "completed")


async def test_a_decode_worker_that_dies_after_the_role_is_replaced() -> None:
    async with decoding([chunk(ROLE)], STREAM[1:]) as (rig, _):
        assert (await ask(rig, CHAT, stream=True)).raw_body == b"".join(STREAM[1:])
        assert (await rig.outcome()) is Outcome.OK
        assert rig.blamed == [("w1", "reset")]


async def test_the_first_token_of_a_stream_waits_for_nothing() -> None:
    more = asyncio.Event()

    async def pauses(wire: Wire, _: Message) -> None:
        wire.send(STREAM_HEAD, chunk(event("one")))
        await more.wait()
        wire.send(chunk(DONE), LAST_CHUNK)

    async with patient_pair("sglang", answers(response()), pauses) as rig, rig.connect() as client:
        client.send(request(body_of(CHAT, stream=True)))
        while b"one" not in await client.read_some():
            pass
        more.set()
        await client.read_some()
        await rig.settled()


async def test_what_clients_say_of_hosts_to_connect_to_reaches_no_worker() -> None:
    async with (
        FakeWorker(answers(response())) as prefill,
        FakeWorker(answers(response())) as decode,
        relay([prefill, decode], settings=ROLES, disaggregation={"policy": "never"}) as rig,
    ):
        await ask(rig, CHAT, **SPOOFED)
        await rig.settled()
    assert msgspec.json.decode(decode.requests[0].body) == {"model": MODEL, **BODIES[CHAT]}


@pytest.mark.parametrize("settings", [ROLES, [{"pull": {"group": "rack", "hint": "vllm-p2p"}}] * 2])
@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions/batch"])
async def test_nor_does_it_where_prompts_are_not_read(path: str, settings: list[dict[str, Any]]) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(answers(response()))) for _ in settings]
        rig = await stack.enter_async_context(relay(workers, settings=settings))
        bodies = [body_of(CHAT, **SPOOFED), b'--x\r\nname="kv_transfer_params"\r\n\r\n{}\r\n--x--', b"[1]"]
        async with rig.connect() as client:
            for body in bodies:
                client.send(request(body, path))
                assert (await client.read_message()).status == 200
        await rig.settled()
    asked = {message.body for worker in workers for message in worker.requests}
    assert asked == {body_of(CHAT), *bodies[1:]}


async def test_prefill_and_decode_worker_are_chosen_together() -> None:
    """The prefill worker that alone is best would be far from the decode worker that has room."""
    settings = [{"role": role, "domain": domain} for role in ("prefill", "decode") for domain in ("a", "b")]
    settings[1] |= {"prefill": {"a_s": 0.02}}
    config = ALWAYS | {"link_gb_s": 0.001, "near_gb_s": [100.0]}
    async with AsyncExitStack() as stack:
        scripts = (PREFILLED, PREFILLED, response(), response())
        workers = [await stack.enter_async_context(FakeWorker(answers(one))) for one in scripts]
        async with relay(workers, settings=settings, disaggregation=config) as rig:
            await ask(rig, CHAT)
            assert (await rig.settled()).worker == "w2"
            context = rig.services.registry.fleet.column("decode_tokens")
            context[2] += 1e7
            await ask(rig, CHAT)
            await eventually(lambda: not rig.services.ledger.in_flight)
            context[2] -= 1e7
            assert (await rig.settled()).worker == "w3"
    assert [len(worker.requests) for worker in workers] == [1, 1, 1, 1]


async def test_a_decode_worker_in_the_prefill_workers_zone_is_preferred() -> None:
    settings = [
        {"role": "prefill", "domain": "b"},
        {"role": "decode", "domain": "a"},
        {"role": "decode", "domain": "b"},
    ]
    async with AsyncExitStack() as stack:
        scripts = (PREFILLED, response(), response())
        workers = [await stack.enter_async_context(FakeWorker(answers(one))) for one in scripts]
        async with relay(workers, settings=settings, disaggregation=ALWAYS) as rig:
            for _ in range(3):
                await ask(rig, CHAT)
                assert (await rig.settled()).worker == "w2"
