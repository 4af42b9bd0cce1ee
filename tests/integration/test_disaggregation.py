"""Prefill and decode on two workers: what each is sent, what the client sees, and what happens when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gateway.admin.explain import explain, print_explanation
from gateway.fleet.registry import State
from gateway.observe.record import Outcome
from sim.server import Fault, SimWorker, WorkerSettings
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
from tests.relay_rig import MODEL, Rig, relay

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONNECTORS = ("nixl", "mooncake", "sglang")
PROMPT = "a story of sixteen bytes or so: " * 40
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
    TEXT: {"prompt": PROMPT, "max_tokens": 12},
}
ALWAYS = {"policy": "always"}
AT_ONCE_S = 0.1
KEPT_S = 3600.0  # of clocks that run faster than the machine may be


def body_of(path: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, **BODIES[path], **fields})


async def ask(rig: Rig, path: str, **fields: Any) -> Message:
    async with rig.connect() as client:
        client.send(request(body_of(path, **fields), path))
        return await client.read_message()


@dataclass
class Fleet:
    """A relay before simulated workers: ``prefills`` and ``decodes``."""

    rig: Rig
    prefills: list[SimWorker]
    decodes: list[SimWorker]


@asynccontextmanager
async def fleet(
    connector: str,
    prefills: Sequence[Fault | None] = (None,),
    decodes: Sequence[Fault | None] = (None,),
    **sections: Any,
) -> AsyncIterator[Fleet]:
    """Serve a relay before one simulated worker per fault, in two pools; it holds the first ones for the fastest."""
    async with AsyncExitStack() as stack:
        workers: list[SimWorker] = []
        for role, faults in (("prefill", prefills), ("decode", decodes)):
            for fault in faults:
                settings = WorkerSettings(
                    model=MODEL,
                    role=role,
                    pd=connector,
                    speed=20,
                    lease_s=KEPT_S,
                    pull_back_s=KEPT_S,
                    faults=(fault,) if fault else (),
                )
                workers.append(await stack.enter_async_context(SimWorker(settings)))
        settings = [
            {
                "role": one.settings.role,
                "pd": connector,
                "bootstrap_port": int(one.url.rpartition(":")[2]),
                "prefill": {"a_s": 0.01 + 0.1 * number if number < len(prefills) else 0.01},
            }
            for number, one in enumerate(workers)
        ]
        sections.setdefault("disaggregation", ALWAYS)
        rig = await stack.enter_async_context(relay([one.url for one in workers], settings=settings, **sections))
        yield Fleet(rig, workers[: len(prefills)], workers[len(prefills) :])


def computed(worker: SimWorker) -> int:
    """Return the prompt tokens that a worker was asked for."""
    return worker.engine.worker.counters.prefix_queries


def handovers(rig: Rig) -> dict[str, float]:
    lines = rig.services.observer.render().decode().splitlines()
    name = "kvway_handovers_total"
    return {line.split(" ")[0].removeprefix(name): float(line.split(" ")[1]) for line in lines if line.startswith(name)}


def counted(prefill: str, decode: str, outcome: str, count: int = 1) -> dict[str, float]:
    return {f'{{prefill="{prefill}",decode="{decode}",outcome="{outcome}"}}': count}


def text_of(message: Message) -> str:
    """Return the text of an answer, streamed or not."""
    if b"data: " in message.body:
        *events, last, nothing = message.body.split(b"\n\n")
        assert (last, nothing) == (b"data: [DONE]", b"")
        parts = [msgspec.json.decode(one.removeprefix(b"data: ")) for one in events]
    else:
        parts = [msgspec.json.decode(message.body)]
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join(
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content", "")
        for choice in choices
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_answer_is_the_one_of_a_request_that_stays_whole(connector: str, path: str, stream: bool) -> None:
    async with SimWorker(WorkerSettings(model=MODEL, speed=20)) as one, relay([one.url]) as rig:
        whole = await ask(rig, path, stream=stream)
    async with fleet(connector) as apart:
        message = await ask(apart.rig, path, stream=stream)
        record = await apart.rig.settled()
        assert computed(apart.prefills[0]) and computed(apart.decodes[0])
        assert handovers(apart.rig) == counted("w0", "w1", "completed")
    assert (message.status, text_of(message)) == (200, text_of(whole))
    assert (record.outcome, record.worker, record.attempts) == (Outcome.OK, "w1", 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_usage_says_what_was_cached_where_the_prompt_was_prefilled(connector: str, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with fleet(connector) as apart:
        for cached in (0, 304):  # the second finds the first's blocks, the last token's excepted
            message = await ask(apart.rig, TEXT, **options)
            last = message.body.split(b"data: ")[-2] if stream else message.body
            usage = msgspec.json.decode(last)["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (320, 12)
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
            record = await apart.rig.settled()
            assert record.cached_tokens == cached


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_dead_prefill_worker_fails_no_request(connector: str, stream: bool) -> None:
    async with fleet(connector, prefills=(Fault("die"), None)) as apart:
        for _ in range(4):
            message = await ask(apart.rig, CHAT, stream=stream)
            assert message.status == 200 and text_of(message)
            await apart.rig.settled()
        # Mooncake's are asked who they are first, and not sent anything where they do not say.
        assert set(apart.rig.blamed) == (set() if connector == "mooncake" else {("w0", "connect")})


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_prefill_worker_killed_while_it_computes_fails_no_request(connector: str) -> None:
    hang = Fault("slow", factor=1e6)
    async with fleet(connector, prefills=(hang, None)) as apart:
        asked = asyncio.ensure_future(ask(apart.rig, CHAT, stream=True))
        dying = apart.prefills[0]
        await eventually(lambda: len(dying.engine) > 0)
        dying.begin_fault(Fault("die"))
        message = await asked
        assert message.status == 200 and text_of(message)
        record = await apart.rig.settled()
        assert (record.worker, record.reason) == ("w2", "apart")
        assert {worker for worker, _ in apart.rig.blamed} == {"w0"}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_dead_decode_worker_fails_no_request(connector: str) -> None:
    async with fleet(connector, decodes=(Fault("die"), None)) as apart:
        for _ in range(3):
            message = await ask(apart.rig, CHAT)
            assert message.status == 200 and text_of(message)
            await apart.rig.settled()
        assert {worker for worker, _ in apart.rig.blamed} == {"w1"}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_decode_worker_killed_before_its_first_token_fails_no_request(connector: str) -> None:
    async with fleet(connector, decodes=(Fault("slow", factor=1e6), None)) as apart:
        asked = asyncio.ensure_future(ask(apart.rig, CHAT, stream=True))
        dying = apart.decodes[0]
        await eventually(lambda: len(dying.engine) > 0)
        dying.begin_fault(Fault("die"))
        message = await asked
        assert message.status == 200 and text_of(message)
        await apart.rig.settled()
        assert apart.rig.blamed == [("w1", "reset")]
        assert handovers(apart.rig) == counted("w0", "w1", "decode_failed") | counted("w0", "w2", "completed")


@pytest.mark.parametrize(
    ("prefill_fault", "decode_fault"), [(Fault("expire_lease", count=1), None), (None, Fault("lose_transfer", count=1))]
)
async def test_kv_that_does_not_arrive_is_computed_where_it_is_needed(
    prefill_fault: Fault | None, decode_fault: Fault | None
) -> None:
    async with fleet("nixl", (prefill_fault,), (decode_fault, decode_fault)) as apart:
        message = await ask(apart.rig, CHAT)
        assert message.status == 200 and text_of(message)
        record = await apart.rig.settled()
        assert record.attempts == 2 and record.reason != "apart"
        assert handovers(apart.rig) == counted("w0", record_of_first(apart), "decode_failed")


def record_of_first(apart: Fleet) -> str:
    return apart.rig.blamed[0][0]


async def test_a_lost_transfer_between_sglang_workers_is_done_again() -> None:
    async with fleet("sglang", decodes=(Fault("lose_transfer", count=1), None)) as apart:
        message = await ask(apart.rig, CHAT)
        assert message.status == 200 and text_of(message)
        assert (await apart.rig.settled()).reason == "apart"


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_without_prefill_workers_requests_stay_whole(connector: str) -> None:
    async with fleet(connector, prefills=(Fault("die"),)) as apart:
        message = await ask(apart.rig, CHAT)
        assert message.status == 200 and text_of(message)
        assert (await apart.rig.settled()).reason != "apart"


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_without_decode_workers_prefill_workers_answer(connector: str) -> None:
    async with fleet(connector, decodes=(Fault("die"),)) as apart:
        message = await ask(apart.rig, CHAT, stream=True)
        assert message.status == 200 and text_of(message)
        record = await apart.rig.settled()
        assert (record.worker, record.reason) == ("w0", "last_resort")


async def test_a_handed_over_stream_that_is_cut_goes_on_elsewhere_where_that_is_on() -> None:
    cut = Fault("cut", count=1, after_tokens=4)
    async with fleet("nixl", decodes=(cut, None), resumption={"max_per_stream": 1}) as apart:
        resumed = await ask(apart.rig, CHAT, stream=True)
        record = await apart.rig.settled()
        whole = await ask(apart.rig, CHAT, stream=True)
        await apart.rig.settled()
        assert (record.outcome, record.resumptions) == (Outcome.OK, 1)
        assert text_of(resumed) == text_of(whole)
        assert sum(handovers(apart.rig).values()) == 3


def turns(rig: Rig) -> dict[str, float]:
    lines = rig.services.observer.render().decode().splitlines()
    begin = 'kvway_handover_turns_total{outcome="'
    counted = (line.removeprefix(begin).split('"} ') for line in lines if line.startswith(begin))
    return {outcome: float(count) for outcome, count in counted}


async def two_turns(apart: Fleet, path: str, second_prompt: str = PROMPT) -> list[Message]:
    """Ask twice, the second time with a longer prompt and another prefill worker than the first."""
    for worker in apart.rig.services.registry.workers.values():
        worker.block_size = 16
    first = await ask(apart.rig, path)
    await apart.rig.settled()
    registry = apart.rig.services.registry
    registry.set_state(registry.workers["w0"], State.DRAINING)
    longer = f"{second_prompt} and so on, at length" * 2
    fields = {"messages": [{"role": "user", "content": longer}]} if path == CHAT else {"prompt": longer}
    second = await ask(apart.rig, path, **fields)
    await apart.rig.settled()
    return [first, second]


async def test_the_next_turns_prefill_worker_pulls_what_the_decode_worker_keeps() -> None:
    async with fleet("nixl", (None, None), disaggregation=ALWAYS | {"pull_back_s": 60}) as apart:
        first, second = await two_turns(apart, TEXT)
        assert (first.status, second.status) == (200, 200)
        assert computed(apart.prefills[1])
        cached = msgspec.json.decode(second.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == apart.rig.records[0].prompt_tokens // 16 * 16
        assert turns(apart.rig)["pulled"] == 1


async def test_a_turn_whose_tokens_the_engine_counts_otherwise_is_not_pulled() -> None:
    async with fleet("nixl", (None, None), disaggregation=ALWAYS | {"pull_back_s": 60}) as apart:
        _, second = await two_turns(apart, CHAT)  # without a tokenizer, a chat's tokens are estimated
        assert second.status == 200
        assert turns(apart.rig) == {}


async def test_a_prompt_that_does_not_go_on_from_a_kept_turn_pulls_nothing() -> None:
    async with fleet("nixl", (None, None), disaggregation=ALWAYS | {"pull_back_s": 60}) as apart:
        await two_turns(apart, TEXT, "another story" + PROMPT)
        assert "pulled" not in turns(apart.rig) and turns(apart.rig)["kept"]


async def test_a_kept_turn_that_is_gone_is_computed_by_the_same_worker_and_nobody_is_blamed() -> None:
    async with fleet("nixl", (None, None), disaggregation=ALWAYS | {"pull_back_s": 60}) as apart:
        apart.prefills[1].begin_fault(Fault("lose_transfer", count=1))
        _, second = await two_turns(apart, TEXT)
        assert second.status == 200
        assert turns(apart.rig)["failed"] == 1
        assert apart.rig.blamed == []
        assert computed(apart.prefills[1])


async def test_nothing_is_kept_unless_it_is_switched_on() -> None:
    async with fleet("nixl", (None, None)) as apart:
        await two_turns(apart, TEXT)
        assert turns(apart.rig) == {}


async def test_pairs_are_measured() -> None:
    async with fleet("nixl") as apart:
        await ask(apart.rig, CHAT, stream=True)
        await apart.rig.settled()
        exposed = apart.rig.services.observer.render().decode()
        figures = {}
        for line in exposed.splitlines():
            name, _, value = line.rpartition('{prefill="w0",decode="w1"} ')
            if name:
                figures[name.removeprefix("kvway_handover_")] = float(value)
        assert figures["streams_total"] == figures["transfers_total"] == 1
        assert 0 < figures["transfer_seconds_total"] < figures["ttft_seconds_total"]
        assert figures["bytes_total"] > 0
        apart.rig.services.registry.remove("w1")
        assert b"decode=" not in apart.rig.services.observer.render()


async def test_sglang_workers_without_a_prefill_worker_say_so() -> None:
    async with fleet("sglang", prefills=(Fault("die"),), retries={"backoff_s": 0.001}) as apart:
        message = await ask(apart.rig, CHAT)
        assert message.status == 503
        assert b"prefill worker" in message.body
        await apart.rig.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_wrong_request_gets_the_workers_own_error(connector: str) -> None:
    async with fleet(connector) as apart:
        message = await ask(apart.rig, CHAT, cache_salt="a@b")
        assert (message.status, b"cache_salt must be" in message.body) == (400, True)
        await apart.rig.settled()
        assert apart.rig.blamed == []


@pytest.mark.parametrize("field", [{"n": 2}, {"echo": True}])
async def test_what_decode_alone_cannot_answer_stays_whole(field: dict[str, Any]) -> None:
    async with fleet("nixl") as apart:
        message = await ask(apart.rig, TEXT, **field)
        assert message.status == 400  # a simulated worker knows neither
        assert (await apart.rig.settled()).reason != "apart"
        assert computed(apart.prefills[0]) == 0


async def test_never_leaves_requests_whole_and_strips_them() -> None:
    async with fleet("nixl", disaggregation={"policy": "never"}) as apart:
        message = await ask(apart.rig, CHAT, kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"})
        assert message.status == 200
        await apart.rig.settled()
        assert computed(apart.prefills[0]) == 0


async def test_break_even_sends_long_prompts_apart_and_cached_ones_not() -> None:
    config = {"policy": "break-even", "link_gb_s": 400, "latency_s": 0.001}
    async with fleet("nixl", disaggregation=config) as apart:
        busy = apart.rig.services.registry.fleet.column("running")
        busy[1] += 50  # they would wait for this prompt
        await ask(apart.rig, CHAT)
        busy[1] -= 50
        assert (await apart.rig.settled()).reason == "apart"
        await ask(apart.rig, CHAT)
        assert (await apart.rig.settled()).reason != "apart"


async def test_explain_shows_whether_a_request_goes_apart_by_which_terms_and_counts_nothing() -> None:
    config = {"policy": "break-even", "link_gb_s": 400, "latency_s": 0.001}
    async with fleet("nixl", (None, None), (None, None), disaggregation=config) as apart:
        services = apart.rig.services
        explained = (await explain(services, CHAT, body_of(CHAT)))["disaggregation"]
        assert (explained["apart"], explained["why"]) == (False, "break-even")
        services.registry.fleet.column("running")[2:] += 50  # they would wait for this prompt
        explained = (await explain(services, CHAT, body_of(CHAT)))["disaggregation"]
        assert (explained["apart"], explained["why"]) == (True, "break-even")
        best, other = explained["pairs"]
        assert (best["chosen"], best["prefill"], best["decode"]) == (True, "w0", "w2")
        assert (other["chosen"], other["prefill"]) == (False, "w1")
        assert best["cost"] < explained["whole"][0]["cost"]
        arrives_s = best["wait_s"] + best["work_s"] + best["transfer_s"]
        assert best["cost"] == pytest.approx(arrives_s + best["step_s"] + best["decode_s"])
        whole = explained["whole"][0]
        terms = ("wait_s", "work_s", "interference_s", "decode_s")
        assert whole["cost"] == pytest.approx(sum(whole[term] for term in terms))
        services.registry.fleet.column("running")[2:] -= 50
        assert services.ledger.in_flight == 0


@pytest.mark.parametrize(
    ("connector", "policy", "field", "expected"),
    [
        ("nixl", "always", {}, (True, "always")),
        ("nixl", "never", {}, (False, "never")),
        ("nixl", "always", {"n": 2}, (False, "form")),
        ("sglang", "never", {}, (True, "sglang")),
    ],
)
async def test_explain_says_what_leaves_no_choice(
    connector: str, policy: str, field: dict[str, Any], expected: tuple[bool, str], capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet(connector, disaggregation={"policy": policy}) as apart:
        explanation = await explain(apart.rig.services, TEXT, body_of(TEXT, **field))
    explained = explanation["disaggregation"]
    assert (explained["apart"], explained["why"]) == expected
    print_explanation(explanation, Console(width=80))
    assert ("w0 prefills and w1 decodes" in capsys.readouterr().out) is expected[0]


# What goes over the wire


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


@pytest.mark.parametrize("dying", ["prefill", "decode"])
async def test_a_leg_that_fails_takes_the_other_along(dying: str) -> None:
    other = Patient()

    async def dies(wire: Wire, _: Message) -> None:
        await other.asked.wait()
        wire.reset()

    scripts = (dies, other) if dying == "prefill" else (other, dies)
    async with patient_pair("sglang", *scripts) as rig:
        asked = asyncio.ensure_future(ask(rig, CHAT))
        await other.asked.wait()
        async with asyncio.timeout(AT_ONCE_S):
            await other.given_up.wait()
        assert (await asked).status == 502
        assert await rig.outcome() is Outcome.UPSTREAM_FAILED
        assert rig.blamed == [("w0" if dying == "prefill" else "w1", "reset")]


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
