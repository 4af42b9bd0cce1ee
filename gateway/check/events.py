"""Whether a worker's KV events arrive: direction, topic, shape, sequence, content and replay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from gateway.check.engine import Engine, note_block_size, note_clock
from gateway.check.findings import Notebook
from gateway.check.mending import kv_events_flag
from gateway.check.prompts import Probe, share_described
from gateway.config import KvEventsConfig
from gateway.events.decode import BadFrames, Batch, Stored, decode_batch, parse_publication, parse_replay
from policies.base import Tier

_HANDSHAKES: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_SUBSCRIPTION_S: Final = 0.1  # it follows the handshake, and nobody says when it has arrived
_QUIET_S: Final = 0.3  # an engine publishes what a prompt brought within a step or two
_LEAST_SHARE: Final = 0.5  # of a prompt that must occur in events; its last block is never whole


class _Heard(NamedTuple):
    topic: bytes
    number: int
    payload: bytes


class EventCheck:
    """Listens to one worker's events for a while.

    Args:
        engine: whose; looked at already, and with ``kv_events`` in its configuration.
        events: those.
        notes: where findings go.
        context: to open sockets in.
        chunk_tokens: tokens per chunk of ours.
        timeout_s: how long to wait for anything.
        clock: Unix seconds.
    """

    def __init__(
        self,
        engine: Engine,
        events: KvEventsConfig,
        notes: Notebook,
        context: zmq.asyncio.Context,
        chunk_tokens: int,
        timeout_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._events = events
        self._notes = notes
        self._context = context
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._clock = clock
        self._flag = f"start the engine with {kv_events_flag(engine.kind, events)}"

    async def run(self, probe: Callable[[], Awaitable[Probe | None]] | None) -> None:
        """Note what there is to be said of the events.

        Args:
            probe: sends a prompt that the engine does not have yet, so that there are events; None: only what happens
                to be published is looked at.
        """
        notes = self._notes
        if self._engine.sources == []:
            notes.problem("events", "the engine says that it publishes no KV events", self._flag)
            if probe is not None:
                await probe()
            return
        if self._engine.sources is not None and len(self._engine.sources) > 1:
            notes.note(
                "events", f"the engine has {len(self._engine.sources)} data-parallel ranks, one of which is heard"
            )
        with self._context.socket(zmq.SUB) as socket:
            connected = await self._connect(socket)
            sent = await probe() if probe is not None else None
            heard = await self._hear(socket, must_come=sent is not None) if connected else []
        if connected:
            self._judge(heard, sent)
        await self._look_at_replay()

    async def _connect(self, socket: zmq.asyncio.Socket) -> bool:
        """Connect or bind, and wait for the other side; False, and noted, if there is none."""
        events, notes = self._events, self._notes
        socket.linger = 0
        socket.ipv6 = "[" in events.endpoint  # an IPv6 address
        socket.subscribe("")  # every topic: a wrong one should be seen
        with socket.get_monitor_socket(_HANDSHAKES) as monitor:
            try:
                if events.mode == "bind":
                    socket.bind(events.endpoint)
                else:
                    socket.connect(events.endpoint)
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    message = f"{events.endpoint} is bound already, by the running gateway if all is well"
                    notes.note("events", message, "stop the gateway to have the events looked at")
                else:
                    message = f"cannot {events.mode} to {events.endpoint}: {error}"
                    notes.problem("events", message, "correct kv_events.endpoint of the worker")
                return False
            met = await self._handshake(monitor)
            socket.disable_monitor()
        if met:
            # Not a sleep: a bound socket subscribes when it is next looked at.
            await socket.poll(round(_SUBSCRIPTION_S * 1000))
            notes.ok("direction", f"the publisher {'connects' if events.mode == 'bind' else 'binds'}, as configured")
            return True
        self._note_direction()
        return False

    async def _handshake(self, monitor: zmq.asyncio.Socket) -> bool:
        if not await monitor.poll(round(self._timeout_s * 1000)):
            return False
        happened = await recv_monitor_message(monitor)
        return bool(happened["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def _note_direction(self) -> None:
        events, sources = self._events, self._engine.sources
        binds = None if not sources else sources[0].binds
        if events.mode == "bind":
            message = f"no publisher connects to {events.endpoint}"
            if binds:
                message += ": the engine binds instead"
            mend = f"{self._flag}; or set kv_events.mode: connect, with the engine's endpoint"
        else:
            message = f"no publisher is bound to {events.endpoint}"
            if sources and sources[0].endpoint != events.endpoint:
                message += f": the engine's is at {sources[0].endpoint}"
            elif binds is False:
                message += ": the engine's connects to it, since its endpoint has no *"
            mend = f"{self._flag}; or correct kv_events.endpoint and kv_events.mode of the worker"
        self._notes.problem("direction", message, mend)

    async def _hear(self, socket: zmq.asyncio.Socket, must_come: bool) -> list[_Heard]:
        """Return what comes until there is a pause."""
        heard: list[_Heard] = []
        patience_s = self._timeout_s if must_come else _QUIET_S
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until and await socket.poll(round(patience_s * 1000)):
            frames = await socket.recv_multipart()
            try:
                heard.append(_Heard(frames[0], *parse_publication(frames)))
            except BadFrames as error:
                self._notes.problem("shape", f"what comes is no KV event: {error}", "correct kv_events.endpoint")
                return []
            patience_s = _QUIET_S
        return heard

    def _judge(self, heard: Sequence[_Heard], sent: Probe | None) -> None:
        notes = self._notes
        if not heard:
            if sent is not None:
                notes.problem("events", "a new prompt was computed, and no event came", self._flag)
            else:
                notes.note("events", "none came while nobody asked for anything")
            return
        topic = self._events.topic.encode()
        strangers = {each.topic.decode("utf-8", "replace") for each in heard if not each.topic.startswith(topic)}
        if strangers:
            mend = "set kv_events.topic to a beginning of the engine's topic, or leave it out"
            notes.problem("topic", f"topic {strangers.pop()!r} does not begin with {self._events.topic!r}", mend)
        else:
            notes.ok("topic", f"topic {heard[0].topic.decode('utf-8', 'replace')!r}")
        gaps = [each.number for before, each in pairwise(heard) if each.number != before.number + 1]
        if gaps:
            message = f"batch {gaps[0]} does not follow on the one before: batches get lost, or two engines publish"
            notes.problem("sequence", message, "give every engine an endpoint of its own; see the engine's hwm")
        else:
            notes.ok("sequence", f"without gaps, up to number {heard[-1].number}")
        batches = self._decode(heard)
        if batches:
            note_clock(notes, batches[-1].time_s - self._clock())
            self._judge_blocks(
                [event for batch in batches for event in batch.events if isinstance(event, Stored)], sent
            )

    def _decode(self, heard: Sequence[_Heard]) -> list[Batch]:
        try:
            batches = [decode_batch(each.payload) for each in heard]
        except BadFrames as error:
            self._notes.problem("shape", f"a batch cannot be read: {error}", "report the engine and its version")
            return []
        bad = sum(batch.bad for batch in batches)
        if bad:
            self._notes.problem("shape", f"{bad} events cannot be read", "report the engine and its version")
        else:
            self._notes.ok("shape", f"events are {_shape(heard[-1].payload)}")
        return batches

    def _judge_blocks(self, stored: Sequence[Stored], sent: Probe | None) -> None:
        notes, engine = self._notes, self._engine
        sizes = {event.block_size for event in stored if event.tokens and event.tier is Tier.HBM}
        if engine.block_size is None and sizes:
            engine.block_size = max(sizes)
            note_block_size(engine, notes, self._chunk_tokens)
        elif sizes and engine.block_size not in sizes:
            # The blocks in the events are those that count.
            message = f"events have blocks of {max(sizes)} tokens, the engine's metrics speak of {engine.block_size}"
            notes.note("block_size", message)
        if sent is None or not sent.ids:
            return
        share = share_described(sent.ids, [event.tokens for event in stored])
        if share < _LEAST_SHARE:
            message = f"events describe {share:.0%} of the prompt that was sent: there will be no hits"
            mend = "is this the endpoint of another worker? Else the tokenizers differ; see tokenizer above"
            notes.problem("content", message, mend)
        else:
            notes.ok("content", "events describe the prompt that was sent")

    async def _look_at_replay(self) -> None:
        endpoint, notes = self._events.replay_endpoint, self._notes
        flag = f"{self._flag} and set kv_events.replay_endpoint"
        if endpoint is None:
            message = "no replay_endpoint is configured: after a lost message a worker's residency is built anew"
            notes.note("replay", message, flag)
            return
        try:
            answers, frames = await self._replay(endpoint)
        except (TimeoutError, BadFrames, zmq.ZMQError) as error:
            why = "does not answer" if isinstance(error, TimeoutError) else f"fails: {error}"
            notes.problem("replay", f"{endpoint} {why}", self._flag)
        else:
            notes.ok("replay", f"{endpoint} answers in {frames} frames, with {answers} batches of the last ones")

    async def _replay(self, endpoint: str) -> tuple[int, int]:
        """Return how many batches are replayed, the last ones only, and the number of frames of an answer."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.ipv6 = "[" in endpoint  # an IPv6 address
            socket.connect(endpoint)
            # From the end on: there may be ten thousand of them.
            await socket.send_multipart([b"", (2**63 - 1).to_bytes(8, "big")])
            answers = 0
            async with asyncio.timeout(self._timeout_s):
                while True:
                    frames = await socket.recv_multipart()
                    if parse_replay(frames) is None:
                        return answers, len(frames)
                    answers += 1


def _shape(payload: bytes) -> str:
    batch = msgspec.msgpack.decode(payload)
    events = batch.get("events") if isinstance(batch, dict) else batch[1]
    return "maps" if events and isinstance(events[0], dict) else "arrays"
