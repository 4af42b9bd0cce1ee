"""Long prompts that go to their worker in pieces, between real sockets; what a worker does is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gateway.admin.explain import explain, print_explanation
from gateway.fleet.registry import State
from gateway.observe.record import Outcome
from tests.peers import LAST_CHUNK, STREAM_HEAD, FakeWorker, Message, Wire, chunk, event, eventually, request, response
from tests.relay_rig import MODEL, Rig, relay

PATH = "/v1/completions"
LONG = list(range(1000, 1300))  # 300 tokens: four pieces of 64, and 44 tokens of its own
PIECES = [64, 128, 192, 256]
TIMED_PREFILLS = 16  # of so many, answers that are not streamed are held, too


class PieceWorker(FakeWorker):
    """Notes what comes, and answers each only when told to.

    Attributes:
        came: user and prompt tokens of each request; a piece has no user.
        status: what pieces are answered with.
        keeps: whether the engine finds again what it has computed.
        dies: in the middle of its streams.
    """

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.came: list[tuple[str, int]] = []
        self.status = "200 OK"
        self.keeps = True
        self.dies = False
        self._computed = 0
        self._waiting: list[asyncio.Event] = []

    def go_on(self) -> None:
        """Let the prefill that came first be done."""
        self._waiting.pop(0).set()

    async def all_of(self, *came: tuple[str, int]) -> None:
        """Let one prefill after the other be done as they come, which is as it is said."""
        for number in range(len(self.came), len(came) + 1):
            await eventually(lambda number=number: len(self.came) >= number)
            if self._waiting:
                self.go_on()
        assert self.came == list(came)

    async def _answer(self, wire: Wire, message: Message) -> None:
        body = msgspec.json.decode(message.body)
        tokens, user = len(body["prompt"]), body.get("user", "")
        self._waiting.append(done := asyncio.Event())
        self.came.append((user, tokens))
        leaves = asyncio.ensure_future(wire.reader.read(1))
        await asyncio.wait({leaves, asyncio.ensure_future(done.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if leaves.done():
            self.came.append((f"{user} has left", tokens))
            return
        leaves.cancel()
        await asyncio.wait({leaves})
        cached = self._computed if self.keeps and tokens > self._computed else 0
        if not user:
            self._computed = tokens
        usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        last = msgspec.json.encode({"choices": [], "usage": usage})
        if body["stream"] and self.dies:
            wire.send(STREAM_HEAD, chunk(event(user)), chunk(event(user))[:-9])
            wire.close()
        elif body["stream"]:
            wire.send(STREAM_HEAD, chunk(event(user)), chunk(b"data: %b\n\n" % last), LAST_CHUNK)
        else:
            wire.send(response(last, "200 OK" if user else self.status))


def body(user: str, tokens: list[int], **fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": tokens, "user": user, "stream": True, **fields})


def short(first: int) -> list[int]:
    return list(range(first, first + 20))


@asynccontextmanager
async def fleet(workers: int = 1, capacity_tokens: int = 100_000, **dispatch: Any) -> AsyncIterator[tuple[Rig, Any]]:
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(PieceWorker()) for _ in range(workers)]
        settings = [{"kv_capacity_tokens": capacity_tokens, "kv_events": {"endpoint": "tcp://127.0.0.1:1"}}] * workers
        dispatch = {"budget_tokens": 64, "piece_tokens": 64, **dispatch}
        rig = await stack.enter_async_context(
            relay(held, settings=settings, dispatch=dispatch, retries={"backoff_s": 0.001})
        )
        yield rig, held


@asynccontextmanager
async def asking(rig: Rig, user: str, tokens: list[int], **fields: Any) -> AsyncIterator[Wire]:
    """A client that has asked."""
    before = rig.services.ledger.in_flight
    async with rig.connect() as wire:
        wire.send(request(body(user, tokens, **fields), path=PATH))
        await eventually(lambda: rig.services.ledger.in_flight > before)
        yield wire


def outcomes(rig: Rig) -> dict[str, int]:
    lines = rig.services.observer.render().decode().splitlines()
    found = [line for line in lines if line.startswith("kvway_dispatch_pieces_total{")]
    return {line.split('"')[1]: int(float(line.rpartition(" ")[2])) for line in found}


async def test_a_long_prompt_goes_in_pieces_and_a_short_one_that_came_later_overtakes() -> None:
    async with fleet() as (rig, [worker]), asking(rig, "long", LONG) as long:
        await eventually(lambda: len(worker.came) == 1)
        async with asking(rig, "short", short(1)) as quick:
            worker.go_on()
            await worker.all_of(("", 64), ("short", 20), *[("", end) for end in PIECES[1:]], ("long", 300))
            assert event("short") in (await quick.read_message()).body
            assert event("long") in (await long.read_message()).body
        sent = [msgspec.json.decode(message.body) for message in worker.requests]
        assert [each["prompt"] for each in sent if "user" not in each] == [LONG[:end] for end in PIECES]
        assert {each["max_tokens"] for each in sent if "user" not in each} == {1}
        await rig.settled()
        assert outcomes(rig) == {"completed": 4}
        assert b"kvway_dispatch_piece_tokens_total 256" in rig.services.observer.render()


async def test_what_pieces_have_left_in_the_cache_is_no_hit() -> None:
    async with fleet() as (rig, [worker]), asking(rig, "long", LONG) as long:
        await worker.all_of(*[("", end) for end in PIECES], ("long", 300))
        assert b'"cached_tokens":0' in (await long.read_message()).body
        record = await rig.settled()
        assert (record.predicted_hit_tokens, record.cached_tokens) == (0, 0)
        assert rig.services.observer.accuracy()["w0"][1:] == (0, 0, 0)


async def test_once_the_worker_is_known_answers_that_are_not_streamed_are_the_same() -> None:
    async with fleet() as (rig, [worker]):
        for number in range(TIMED_PREFILLS):
            async with asking(rig, "short", short(number)) as wire:
                await worker.all_of(*[("short", 20)] * (number + 1))
                await wire.read_message()
        worker.came.clear()
        async with asking(rig, "long", LONG, stream=False) as long:
            await worker.all_of(*[("", end) for end in PIECES], ("long", 300))
            assert msgspec.json.decode((await long.read_message()).body)["usage"] == {
                "prompt_tokens": 300,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        assert (await rig.settled()).cached_tokens == 0


async def test_a_stream_that_is_cut_after_pieces_ends_with_an_error() -> None:
    async with fleet() as (rig, [worker]), asking(rig, "long", LONG) as long:
        worker.dies = True
        await worker.all_of(*[("", end) for end in PIECES], ("long", 300))
        body = (await long.read_message()).body
        assert body.startswith(event("long") + b'data: {"error":')
        await rig.settled()


async def test_of_two_long_prompts_the_one_that_was_begun_is_finished_first() -> None:
    async with fleet() as (rig, [worker]), asking(rig, "one", LONG), asking(rig, "two", [7, *LONG]):
        first = [*[("", end) for end in PIECES], ("one", 300)]
        await worker.all_of(*first, *[("", end) for end in PIECES], ("two", 301))


async def test_what_waits_ages_from_when_it_came_in_pieces_too() -> None:
    async with fleet(params={"ageing": 1000}) as (rig, [worker]), asking(rig, "long", LONG):
        await eventually(lambda: len(worker.came) == 1)
        async with asking(rig, "short", short(1)):
            await worker.all_of(*[("", end) for end in PIECES], ("long", 300), ("short", 20))


async def test_while_a_piece_is_computed_the_whole_prompt_is_counted() -> None:
    async with fleet() as (rig, [worker]), asking(rig, "long", LONG):
        view = rig.services.registry.fleet
        for left in (300, 236):
            await eventually(lambda left=left: len(worker.came) == 1 + (left < 300))
            assert view.pending_prefill_tokens.tolist() == [left]
            worker.go_on()


async def test_a_client_that_leaves_while_a_piece_is_computed_leaves_nothing_behind() -> None:
    async with fleet() as (rig, [worker]):
        async with asking(rig, "long", LONG):
            await eventually(lambda: len(worker.came) == 1)
        await eventually(lambda: worker.came == [("", 64), (" has left", 64)])
        assert await rig.outcome() is Outcome.CLIENT_GONE
        async with asking(rig, "next", short(1)):
            await eventually(lambda: worker.came[2:] == [("next", 20)])


async def test_a_client_that_leaves_while_the_next_piece_is_held_leaves_nothing_behind() -> None:
    async with fleet() as (rig, [worker]):
        async with asking(rig, "long", LONG) as long:
            await eventually(lambda: len(worker.came) == 1)
            async with asking(rig, "short", short(1)):
                worker.go_on()
                await eventually(lambda: worker.came == [("", 64), ("short", 20)])
                long.close()
                await eventually(lambda: len(rig.records) == 1)
                worker.go_on()
                await rig.settled()
        assert worker.came == [("", 64), ("short", 20)]


async def test_a_worker_killed_under_a_piece_gives_the_prompt_to_another_in_pieces_again() -> None:
    async with fleet(workers=2) as (rig, [first, second]), asking(rig, "long", LONG) as long:
        await eventually(lambda: len(first.came) == 1)
        first.kill()
        await second.all_of(*[("", end) for end in PIECES], ("long", 300))
        assert event("long") in (await long.read_message()).body
        record = await rig.settled()
        assert (record.worker, record.cached_tokens) == ("w1", 0)
        assert outcomes(rig) == {"failed": 1, "completed": 4}


@pytest.mark.parametrize("state", [State.EJECTED, State.DRAINING, None])
async def test_a_worker_that_takes_no_more_requests_gives_the_prompt_back_between_pieces(state: State | None) -> None:
    async with fleet(workers=2) as (rig, [first, second]), asking(rig, "long", LONG) as long:
        await eventually(lambda: len(first.came) == 1)
        registry = rig.services.registry
        if state is None:
            registry.remove("w0")
        else:
            registry.set_state(registry.workers["w0"], state)
        first.go_on()
        await second.all_of(*[("", end) for end in PIECES], ("long", 300))
        assert first.came == [("", 64)]
        assert event("long") in (await long.read_message()).body
        await rig.settled()


async def test_an_ejected_worker_that_is_the_only_one_gets_long_prompts_whole() -> None:
    async with fleet() as (rig, [worker]):
        rig.services.registry.set_state(rig.services.registry.workers["w0"], State.EJECTED)
        async with asking(rig, "long", LONG) as long:
            await worker.all_of(("long", 300))  # after a piece it would be given back, and sent there again
            assert event("long") in (await long.read_message()).body
        await rig.settled()


async def test_when_the_only_worker_is_removed_under_a_piece_the_client_hears_of_it() -> None:
    async with fleet() as (rig, [worker]), asking(rig, "long", LONG) as long:
        await eventually(lambda: len(worker.came) == 1)
        rig.services.registry.remove("w0")
        worker.kill()
        assert (await long.read_message()).status in (404, 503)
        await rig.settled()


async def test_where_pieces_are_refused_the_prompt_goes_whole_and_so_do_those_after_it() -> None:
    async with fleet() as (rig, [worker]):
        worker.status = "400 Bad Request"
        async with asking(rig, "long", LONG) as long:
            await worker.all_of(("", 64), ("long", 300))
            assert event("long") in (await long.read_message()).body
        async with asking(rig, "next", [7, *LONG]):
            await worker.all_of(("", 64), ("long", 300), ("next", 301))
        await rig.settled()
        assert outcomes(rig) == {"refused": 1}
        assert not rig.blamed


async def test_pieces_bring_the_clients_own_key_and_one_that_is_turned_away_speaks_for_itself_alone() -> None:
    async with fleet() as (rig, [worker]), rig.connect() as wire:
        worker.status = "401 Unauthorized"
        for user in ("one", "two"):
            key = {"Authorization": f"Bearer of {user}"}
            wire.send(request(body(user, [len(worker.came), *LONG]), path=PATH, headers=key))
            await worker.all_of(*worker.came, ("", 64), (user, 301))
            await wire.read_message()
        await rig.settled()
        keys = [message.headers["authorization"] for message in worker.requests]
        assert keys == ["Bearer of one"] * 2 + ["Bearer of two"] * 2
        assert outcomes(rig) == {"refused": 2}


async def test_after_a_piece_that_fails_the_prompt_goes_whole_and_the_next_one_is_tried_again() -> None:
    async with fleet() as (rig, [worker]):
        worker.status = "503 Service Unavailable"
        async with asking(rig, "long", LONG) as long:
            await eventually(lambda: len(worker.came) == 1)
            assert rig.services.registry.fleet.pending_prefill_tokens.tolist() == [300]
            worker.go_on()
            await eventually(lambda: len(worker.came) == 2)
            assert rig.services.registry.fleet.pending_prefill_tokens.tolist() == [300]
            worker.status = "200 OK"
            worker.go_on()
            await long.read_message()
        async with asking(rig, "next", [7, *LONG]):
            await eventually(lambda: worker.came == [("", 64), ("long", 300), ("", 64)])
        await rig.settled()
        assert outcomes(rig)["failed"] == 1


async def test_where_an_engine_keeps_nothing_prompts_soon_go_whole() -> None:
    async with fleet() as (rig, [worker]):
        worker.keeps = False
        expected: list[tuple[str, int]] = []
        for number in range(4):
            user = f"{number}"
            expected += [("", 64), ("", 128), (user, 301)] if number < 3 else [(user, 301)]
            async with asking(rig, user, [number, *LONG]) as wire:
                await worker.all_of(*expected)
                await wire.read_message()
        await rig.settled()
        assert [record.cached_tokens for record in rig.records] == [0, 0, 0, 0]
        assert outcomes(rig) == {"completed": 3, "evicted": 3}


@pytest.mark.parametrize(
    ("tokens", "fields", "settings"),
    [
        (LONG[:128], {}, {}),
        (LONG, {}, {"capacity_tokens": 374}),  # fills more than 80 %
        (LONG, {}, {"piece_tokens": 0}),
        (LONG, {}, {"order": "fifo"}),
        (LONG, {"stream": False}, {}),  # not held as long as the worker's speed is not known
    ],
)
async def test_what_goes_whole(tokens: list[int], fields: dict[str, Any], settings: dict[str, Any]) -> None:
    async with fleet(**settings) as (rig, [worker]), asking(rig, "it", tokens, **fields):
        await worker.all_of(("it", len(tokens)))
    await rig.settled()


@pytest.mark.parametrize(
    ("engine", "answer_tokens", "longest", "first"),
    [
        ("sglang", 11, 310, ("it", 300)),
        ("sglang", 10, 310, ("", 64)),
        ("vllm", 11, 310, ("", 64)),  # which makes the answer shorter
        ("vllm", 1, 300, ("it", 300)),
    ],
)
async def test_what_is_too_long_for_its_engine_is_refused_without_pieces(
    engine: str, answer_tokens: int, longest: int, first: Any
) -> None:
    async with fleet() as (rig, [worker]):
        rig.services.registry.workers["w0"].model_cards = [{"id": MODEL, "owned_by": engine, "max_model_len": longest}]
        async with asking(rig, "it", LONG, max_tokens=answer_tokens):
            await eventually(lambda: worker.came == [first])
        await rig.settled()


async def test_a_prompt_whose_token_ids_are_not_known_goes_whole() -> None:
    async with fleet() as (rig, [worker]), rig.connect() as wire:
        text = "word " * 300
        wire.send(
            request(msgspec.json.encode({"model": MODEL, "prompt": text, "user": "it", "stream": True}), path=PATH)
        )
        await worker.all_of(("it", len(text)))
        await wire.read_message()
        await rig.settled()


@pytest.mark.parametrize(
    ("tokens", "fields", "settings", "expected"),
    [
        (LONG, {}, {}, "computed in 4 pieces and the request itself"),
        (LONG[:128], {}, {}, "computed as a whole: no more than two pieces of it are to be computed"),
        (LONG, {}, {"capacity_tokens": 374}, "computed as a whole: the worker's cache has no room"),
        (LONG, {}, {"piece_tokens": 0}, "computed as a whole: dispatch.piece_tokens is 0"),
        (LONG, {}, {"order": "fifo"}, "computed as a whole: dispatch.order is fifo"),
        (LONG, {}, {"order": "none"}, "computed as a whole: dispatch.order is none"),
        (LONG, {"stream": False}, {}, "computed as a whole: its answer is not streamed"),
        (LONG, {"prompt": "word " * 300}, {}, "computed as a whole: its token ids are not known"),
        (LONG, {"max_tokens": 400}, {}, "computed as a whole: it is longer than the worker's models take"),
    ],
)
async def test_explain_says_in_how_many_pieces_or_why_in_none(
    tokens: list[int], fields: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    async with fleet(**settings) as (rig, [worker]):
        rig.services.registry.workers["w0"].model_cards = [{"id": MODEL, "max_model_len": 600}]
        explanation = await explain(rig.services, PATH, body("it", tokens, **fields))
        with (console := Console(width=200)).capture() as printed:
            print_explanation(explanation, console)
        assert printed.get().splitlines()[1].startswith(expected)
        assert not worker.came


async def test_explain_says_that_a_worker_which_refuses_pieces_gets_none() -> None:
    async with fleet() as (rig, [worker]):
        worker.status = "400 Bad Request"
        async with asking(rig, "long", LONG) as long:
            await worker.all_of(("", 64), ("long", 300))
            await long.read_message()
        prefill = (await explain(rig.services, PATH, body("it", [7, *LONG])))["prefill"]
        assert prefill["pieces"] == 0
        assert "refused" in prefill["why_whole"]
