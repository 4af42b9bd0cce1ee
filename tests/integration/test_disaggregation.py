"""Prefill and decode on two workers: what each is sent, what the client sees, and what happens when one fails."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gateway.admin.explain import explain, print_explanation
from gateway.fleet.registry import State
from gateway.observe.record import Outcome, RequestRecord
from sim.server import Fault, SimWorker, WorkerSettings
from tests.pd_rig import (
    ALWAYS,
    CHAT,
    CONNECTORS,
    PROMPT,
    TEXT,
    Fleet,
    ask,
    body_of,
    computed,
    counted,
    fleet,
    handovers,
    text_of,
)
from tests.peers import (
    Message,
    eventually,
)
from tests.relay_rig import MODEL, Rig, relay


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
    # LMCache's prefill worker cannot write, and says nothing of it.
    patience = ALWAYS | ({"lease_s": 0.2} if connector == "lmcache" else {})
    async with fleet(connector, decodes=(Fault("die"), None), disaggregation=patience) as apart:
        for _ in range(3):
            message = await ask(apart.rig, CHAT)
            assert message.status == 200 and text_of(message)
            await apart.rig.settled()
        assert {worker for worker, _ in apart.rig.blamed} == {"w1"}


@pytest.mark.parametrize(("lease_s", "prefills"), [(20.0, 1), (0.0, 2)])
async def test_kv_that_nobody_has_fetched_is_offered_again_within_its_lease(lease_s: float, prefills: int) -> None:
    async with fleet("nixl", decodes=(Fault("die"), None), disaggregation=ALWAYS | {"lease_s": lease_s}) as apart:
        record = await answered(apart)
        assert (record.worker, record.attempts) == ("w2", 2)
        assert computed(apart.prefills[0]) == prefills * record.prompt_tokens


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
        (lost,) = {"w1", "w2"} - {record.worker}
        assert handovers(apart.rig) == counted("w0", lost, "decode_failed")


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_decode_worker_is_blamed_for_lost_kv_once_it_was_that_of_two_prefill_workers(connector: str) -> None:
    async with fleet(connector, (None, None), (Fault("lose_transfer"),)) as apart:
        for _ in range(3):
            await answered(apart)
        assert apart.rig.blamed == []
        registry = apart.rig.services.registry
        registry.set_state(registry.workers["w0"], State.DRAINING)
        await answered(apart)
        assert apart.rig.blamed == [("w2", "bad_status")]
        apart.decodes[0].begin_fault(Fault("none"))
        await answered(apart)
        apart.decodes[0].begin_fault(Fault("lose_transfer"))
        await answered(apart)
        assert len(apart.rig.blamed) == 1


async def answered(apart: Fleet) -> RequestRecord:
    message = await ask(apart.rig, TEXT)
    assert message.status == 200 and text_of(message)
    return await apart.rig.settled()


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


async def test_a_worker_that_has_left_before_its_answer_ends_keeps_nothing() -> None:
    async with fleet("nixl", disaggregation=ALWAYS | {"pull_back_s": 60}) as apart:
        for worker in apart.rig.services.registry.workers.values():
            worker.block_size = 16
        asked = asyncio.ensure_future(ask(apart.rig, TEXT, max_tokens=200))
        await eventually(lambda: bool(computed(apart.decodes[0])))
        apart.rig.services.registry.remove("w1")
        assert (await asked).status == 200
        assert turns(apart.rig) == {}


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


async def test_an_sglang_prefill_worker_never_stands_in_for_a_decode_worker() -> None:
    async with fleet("sglang", prefills=(None, None)) as apart:
        registry = apart.rig.services.registry
        registry.set_state(registry.workers["w2"], State.EJECTED)
        message = await ask(apart.rig, CHAT)
        assert (message.status, b"prefill worker" in message.body) == (503, True)
        await apart.rig.settled()
        assert not any(computed(worker) for worker in apart.prefills)


@pytest.mark.parametrize("field", [{"n": 10**9}, {"n": "two"}, {"echo": True}])
async def test_what_sglang_workers_of_one_role_cannot_do_is_the_requests_fault(field: dict[str, Any]) -> None:
    async with fleet("sglang") as apart:
        message = await ask(apart.rig, TEXT, **field)
        assert (message.status, b"n from 1 to 1024 and without echo" in message.body) == (400, True)
        await apart.rig.settled()
        assert apart.rig.services.ledger.in_flight == 0


async def test_pools_without_a_common_protocol_leave_requests_whole_and_explain_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fleet("nixl") as apart:
        services = apart.rig.services
        decode = services.registry.workers["w1"]
        decode.config = decode.config.model_copy(update={"pd": "mooncake"})
        assert (await ask(apart.rig, CHAT)).status == 200
        assert (await apart.rig.settled()).reason != "apart"
        explanation = await explain(services, CHAT, body_of(CHAT))
    assert explanation["disaggregation"] == {"apart": False, "why": "no_pair"}
    print_explanation(explanation, Console(width=80))
    assert "no prefill worker has the protocol" in capsys.readouterr().out


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
