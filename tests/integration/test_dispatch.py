"""Requests held at the gateway until their turn, between real sockets; what a worker does is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.admin.explain import explain
from gateway.fleet.registry import State
from gateway.observe.record import Outcome
from policies.base import RoutingRequest
from tests.peers import STREAM_HEAD, FakeWorker, Message, Wire, answer, chunk, event, eventually, request, response
from tests.relay_rig import MODEL, Rig, relay

PATH = "/v1/completions"


class HeldWorker(FakeWorker):
    """Notes who has come, and gives each its first token only when told to; the streams stay open."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.came: list[str] = []
        self._prefilled: dict[str, asyncio.Event] = {}

    def prefill(self, user: str) -> None:
        """Let the prefill of a user's request be done."""
        self._prefilled[user].set()

    async def _answer(self, wire: Wire, message: Message) -> None:
        user = msgspec.json.decode(message.body)["user"]
        self._prefilled[user] = asyncio.Event()
        self.came.append(user)
        await self._prefilled[user].wait()
        wire.send(STREAM_HEAD + chunk(event(user)))
        await wire.gone()


def body(user: str, words: int = 10, **fields: Any) -> bytes:
    fields = {"stream": True, **fields}
    return msgspec.json.encode({"model": MODEL, "prompt": f"{user} " * words, "user": user, **fields})


@asynccontextmanager
async def fleet(
    workers: int = 1, capacity_tokens: int | None = None, **dispatch: Any
) -> AsyncIterator[tuple[Rig, list[HeldWorker]]]:
    async with AsyncExitStack() as stack:
        settings = [{"kv_capacity_tokens": capacity_tokens}] * workers
        held = [await stack.enter_async_context(HeldWorker()) for _ in range(workers)]
        dispatch = {"order": "least-work", "budget_tokens": 1, **dispatch}
        rig = await stack.enter_async_context(
            relay(held, settings=settings, dispatch=dispatch, retries={"backoff_s": 0.001})
        )
        yield rig, held


class Clients:
    """Clients that have asked and not yet left."""

    def __init__(self, rig: Rig, stack: AsyncExitStack) -> None:
        self._rig = rig
        self._stack = stack
        self.wires: dict[str, Wire] = {}

    async def ask(self, user: str, words: int = 10, **fields: Any) -> Wire:
        wire = self.wires[user] = await self._stack.enter_async_context(self._rig.connect())
        before = self._rig.services.ledger.in_flight
        wire.send(request(body(user, words, **fields), path=PATH))
        await eventually(lambda: self._rig.services.ledger.in_flight > before)
        return wire


def waiting(rig: Rig) -> int:
    dispatcher = rig.services.dispatcher
    assert dispatcher is not None
    return sum(dispatcher.waiting(worker)[0] for worker in rig.services.registry.workers.values())


async def test_held_requests_go_on_as_prefills_are_done_least_work_first() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        await clients.ask("first", 100)
        await eventually(lambda: worker.came == ["first"])
        for user, words in (("long", 900), ("short", 10), ("middle", 300)):
            await clients.ask(user, words)
        assert waiting(rig) == 3
        for number, user in enumerate(["first", "short", "middle", "long"], start=1):
            await eventually(lambda number=number: len(worker.came) == number)
            worker.prefill(user)
        assert worker.came == ["first", "short", "middle", "long"]
        await eventually(lambda: waiting(rig) == 0)


async def test_small_requests_go_to_the_worker_together_up_to_the_budget() -> None:
    async with fleet(budget_tokens=8192) as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for user in "abcd":
            await clients.ask(user)
        await eventually(lambda: sorted(worker.came) == list("abcd"))
        assert waiting(rig) == 0


async def test_the_more_urgent_goes_first() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        await clients.ask("first")
        await clients.ask("short", 10)
        await clients.ask("urgent", 500, priority=-1)
        await eventually(lambda: worker.came == ["first"])
        worker.prefill("first")
        await eventually(lambda: worker.came == ["first", "urgent"])


async def test_a_held_request_whose_client_leaves_never_reaches_a_worker() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        await clients.ask("first")
        (await clients.ask("leaving")).close()
        await eventually(lambda: [record.outcome for record in rig.records] == [Outcome.CLIENT_GONE])
        assert waiting(rig) == 0
        await clients.ask("next")
        await eventually(lambda: worker.came == ["first"])
        worker.prefill("first")
        await eventually(lambda: worker.came == ["first", "next"])
        for wire in clients.wires.values():
            wire.close()
        await rig.settled()


async def test_requests_held_for_a_worker_that_fails_go_to_another() -> None:
    async with fleet(workers=2) as (rig, [first, second]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for user in "abcd":  # in turn, so that each worker has one and holds one
            await clients.ask(user)
        await eventually(lambda: first.came == ["a"] and second.came == ["b"])
        rig.services.registry.set_state(rig.services.registry.workers["w0"], State.EJECTED)
        second.prefill("b")
        await eventually(lambda: len(second.came) == 2)
        second.prefill(second.came[-1])
        await eventually(lambda: sorted(second.came) == ["b", "c", "d"])
        assert first.came == ["a"]


async def test_requests_held_for_a_worker_that_is_removed_go_to_another() -> None:
    async with fleet(workers=2) as (rig, [first, second]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for user in "abcd":
            await clients.ask(user)
        await eventually(lambda: first.came == ["a"] and second.came == ["b"])
        rig.services.registry.remove("w0")
        second.prefill("b")
        await eventually(lambda: len(second.came) == 2)
        second.prefill(second.came[-1])
        await eventually(lambda: sorted(second.came) == ["b", "c", "d"])


async def test_a_request_that_leaves_its_worker_unanswered_lets_the_next_one_on() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        first = await clients.ask("first")
        await clients.ask("second")
        first.close()
        await eventually(lambda: worker.came[-1:] == ["second"])


async def test_beyond_the_bound_requests_are_refused_and_told_when_to_come_again() -> None:
    async with fleet(max_held=1) as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        await clients.ask("first")
        await clients.ask("second")
        async with rig.connect() as client:
            client.send(request(body("third"), path=PATH))
            answer = await client.read_message()
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert msgspec.json.decode(answer.body)["error"]["code"] == "queue_full"
        assert b"kvway_queue_full_total 1" in rig.services.observer.render()
        assert worker.came == ["first"]


async def test_an_answer_that_is_not_streamed_makes_room_when_its_prefill_must_be_done() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for number in range(16):  # so that the worker's speed is known
            await clients.ask(f"{number}")
            await eventually(lambda number=number: len(worker.came) == number + 1)
            worker.prefill(f"{number}")
        await eventually(lambda: not rig.services.registry.fleet.pending_prefill_tokens.any())
        await clients.ask("whole", 500, stream=False)
        await clients.ask("next")
        assert waiting(rig) == 1
        await eventually(lambda: worker.came[16:] == ["whole", "next"])


async def test_answers_that_are_not_streamed_are_not_held_where_the_speed_is_not_known() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for user in "abcd":
            await clients.ask(user, 5000, stream=False)
        await eventually(lambda: sorted(worker.came) == list("abcd"))


async def test_a_conversation_that_has_lost_its_context_waits_for_room_and_is_passed_meanwhile(monkeypatch) -> None:
    monkeypatch.setattr("policies.room.BUSY", -1.0)  # however little a worker prefills, it is crowded
    monkeypatch.setattr("policies.room.PATIENCE", 1e6)
    async with fleet(2, capacity_tokens=500) as (rig, [elsewhere, crowded]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)

        async def ask(user: str, ids: range, worker: HeldWorker) -> None:
            await clients.ask(user, prompt=list(ids))
            await eventually(lambda: worker.came[-1:] == [user])
            worker.prefill(user)

        await ask("turn 1", range(160), elsewhere)
        await ask("runner", range(1000, 1480), crowded)
        await ask("other", range(2000, 2010), elsewhere)
        await eventually(lambda: rig.services.registry.fleet.decode_tokens[1] == 480)
        await clients.ask("turn 2", prompt=list(range(200)))
        assert waiting(rig) == 1
        assert b'kvway_worker_crowded{worker="w1"} 1' in rig.services.observer.render()
        await ask("another", range(3000, 3010), elsewhere)
        await ask("new", range(4000, 4160), crowded)
        assert waiting(rig) == 1
        clients.wires["runner"].close()
        await eventually(lambda: crowded.came == ["runner", "new", "turn 2"])


async def test_what_was_only_held_before_has_lost_no_context(monkeypatch) -> None:
    monkeypatch.setattr("policies.room.BUSY", -1.0)
    monkeypatch.setattr("policies.room.PATIENCE", 1e6)
    async with fleet(2, capacity_tokens=500) as (rig, [failing, crowded]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        await clients.ask("busy", prompt=list(range(10)))
        await eventually(lambda: failing.came == ["busy"])
        await clients.ask("runner", prompt=list(range(1000, 1480)))
        await eventually(lambda: crowded.came == ["runner"])
        crowded.prefill("runner")
        await eventually(lambda: rig.services.registry.fleet.decode_tokens[1] == 480)
        await clients.ask("new", prompt=list(range(2000, 2160)))
        assert waiting(rig) == 1
        rig.services.registry.set_state(rig.services.registry.workers["w0"], State.EJECTED)
        await eventually(lambda: crowded.came == ["runner", "new"])
        assert rig.services.registry.fleet.running[1] == 2  # it did not wait for the other's end


async def test_what_is_held_is_explained_and_measured() -> None:
    async with fleet() as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for user in "abc":
            await clients.ask(user)
        [candidate] = (await explain(rig.services, PATH, body("d")))["candidates"]
        assert candidate["held_requests"] == 2
        assert candidate["held_s"] > 0
        metrics = rig.services.observer.render()
        assert b'kvway_held_requests{worker="w0"} 2' in metrics
        assert b"kvway_held_requests_total 2" in metrics
        assert worker.came == ["a"]


@pytest.mark.parametrize("pd", ["nixl", "sglang"])
async def test_workers_are_not_blamed_for_the_time_that_a_prefill_is_held(pd: str) -> None:
    header_s = 0.3
    params = b'{"kv_transfer_params":{"do_remote_prefill":true}}'
    settings = [{"role": role, "pd": pd} for role in ("prefill", "decode")]
    sections = {"dispatch": {"order": "least-work", "budget_tokens": 1}, "disaggregation": {"policy": "always"}}

    async def decodes(wire: Wire, _: Message) -> None:
        await eventually(lambda: bool(prefill.requests))
        wire.send(response())

    async with (
        FakeWorker(answer(response(params))) as prefill,
        FakeWorker(decodes) as decode,
        relay([prefill, decode], settings=settings, timeouts={"header_s": header_s}, **sections) as rig,
    ):
        services = rig.services
        dispatcher, worker = services.dispatcher, services.registry.workers["w0"]
        assert dispatcher is not None
        other = services.ledger.dispatch(worker, 100, 100, 0.1, monotonic(), held=True)
        assert await dispatcher.turn(other, RoutingRequest(MODEL, 100))
        async with rig.connect() as client:
            client.send(request(body("held", stream=False), path=PATH))
            await eventually(lambda: waiting(rig) == 1)
            await asyncio.sleep(1.5 * header_s)
            other.end(monotonic())
            assert (await client.read_message()).status == 200
        assert (await rig.settled()).reason == "apart"
        assert rig.blamed == []


async def test_without_an_order_nothing_is_held() -> None:
    async with fleet(order="none") as (rig, [worker]), AsyncExitStack() as stack:
        clients = Clients(rig, stack)
        for user in "abcd":
            await clients.ask(user, 1000)
        await eventually(lambda: len(worker.came) == 4)
        assert rig.services.dispatcher is None
