"""Listens to one engine's KV cache events and hands them on in order, without gaps.

The engine publishes over a PUB socket, which drops what it cannot send, and answers on a ROUTER socket from a buffer of
its last batches. Batches are numbered from the start of the process, so:

* a number beyond the next one is a gap: the missing batches are asked for again; if the buffer no longer has them,
  removals may be among them, and what was known is void;
* a number that was published before, or another payload under the number last seen, is another process: a restart;
  with every new connection the last payload is compared;
* silence may mean that the last messages, or the connection, were lost: after a while the buffer is asked;
* a buffer that did not answer when it was asked may do so later, and then have what came before the first batch known.

A subscriber that comes late starts with all that the buffer has. While the index is slow, messages pile up in ZMQ's
bounded queue; what overflows there is a gap like any other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

import zmq
import zmq.asyncio

from gateway.config import KvEventsConfig
from gateway.events.decode import BadFrames, parse_publication, parse_replay

log = logging.getLogger("kvway.events")

QUEUED_MESSAGES: Final = 100_000  # as many as vLLM's publisher queues
MAX_MESSAGE_BYTES: Final = 64 * 2**20
# Batches handed over at once, by number and by size: their assembly keeps the event loop to itself.
BURST: Final = 64
BURST_BYTES: Final = 64 * 1024
REPLAY_TIMEOUT_S: Final = 2.0
SILENCE_S: Final = 5.0
MAX_SILENCE_S: Final = 60.0
STALLS: Final = 2  # replay requests without progress before giving up
_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2_000
_HEARTBEAT_MS: Final = 5_000


@dataclass(slots=True)
class FeedStats:
    """What the events of one worker have amounted to.

    Attributes:
        batches: payloads taken in, ``replayed`` of them from the engine's buffer.
        events: events in them.
        blocks: blocks stored or removed by these.
        bad_events: events, or whole messages, that could not be read.
        skipped_events: events of no use here: unknown types, groups without reusable prefixes.
        gaps: times that batches were missing.
        lost: times that they stayed missing, so that the worker's residency was built anew.
        restarts: times that another engine process was noticed.
        resyncs: times that residency was built anew because predictions did not come true.
        lag_s: seconds between the engine's publishing of the last batch and its taking in here.
    """

    batches: int = 0
    replayed: int = 0
    events: int = 0
    blocks: int = 0
    bad_events: int = 0
    skipped_events: int = 0
    gaps: int = 0
    lost: int = 0
    restarts: int = 0
    resyncs: int = 0
    lag_s: float = 0.0


class Sink(Protocol):
    """Where batches go."""

    async def take(self, payloads: list[bytes]) -> None:
        """Take in batches that follow on those before."""
        ...

    async def joined_late(self) -> None:
        """The engine's first batches are not to be had; those that follow are the first known."""
        ...

    async def lost(self) -> None:
        """Batches are missing for good: what was known is void. What the engine's buffer still has will follow."""
        ...

    async def begun_too_late(self) -> None:
        """The engine's buffer, silent when it was asked for what came before, has it: all could be read from there."""
        ...

    async def caught_up(self) -> None:
        """All that the engine's buffer had at the start is taken in, if it answered."""
        ...

    async def restarted(self) -> None:
        """The engine is another process. What follows is its own."""
        ...


class Subscriber:
    """One engine's events.

    Args:
        config: endpoints, topic and direction.
        sink: where batches go; its methods are called one at a time.
        stats: counted into.
        context: ZMQ context to open sockets in.
        silence_s: seconds without a message after which the replay buffer is asked.
    """

    def __init__(
        self,
        config: KvEventsConfig,
        sink: Sink,
        stats: FeedStats,
        context: zmq.asyncio.Context,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._config = config
        self._sink = sink
        self._stats = stats
        self._context = context
        self._silence_s = silence_s
        self._patience_s = silence_s
        self._next: int | None = None  # number of the batch to come; None: nothing has been seen of this process
        self._last = b""  # payload of the batch before
        self._published = -1  # highest number that came over the PUB socket
        self._replays = False  # whether the engine's buffer has ever had anything
        self._blind_from = 0  # number of the batch known first, if the buffer has not said what it has before that
        self._batches: list[bytes] = []
        self._batches_bytes = 0

    async def run(self) -> None:
        """Receive for ever. ZMQ reconnects by itself.

        Raises:
            zmq.ZMQError: the endpoint cannot be connected to or bound: it is malformed, or in use.
        """
        with (
            self._subscribe() as socket,
            socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connections,
        ):
            await self._catch_up()
            await self._sink.caught_up()
            while True:
                messages = await _receive(socket, self._patience_s)
                # A new connection may lead to a new process whose numbers happen to fit: the buffer shows that.
                if _waiting(connections):
                    await self._catch_up()
                for frames in messages:
                    try:
                        number, payload = parse_publication(frames)
                    except BadFrames:
                        self._stats.bad_events += 1
                    else:
                        await self._follow(number, payload)
                await self._hand_over()
                if not messages:
                    await self._catch_up()

    def _subscribe(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        try:
            socket.linger = 0
            socket.rcvhwm = QUEUED_MESSAGES
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.reconnect_ivl = _RECONNECT_MS
            socket.reconnect_ivl_max = _RECONNECT_MAX_MS
            socket.heartbeat_ivl = _HEARTBEAT_MS
            socket.ipv6 = "[" in self._config.endpoint  # an IPv6 address: libzmq takes none unless told
            socket.subscribe(self._config.topic)
            if self._config.mode == "bind":
                socket.bind(self._config.endpoint)
            else:
                socket.connect(self._config.endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    async def _follow(self, number: int, payload: bytes) -> None:
        if number <= self._published:
            await self._restarted()
        if self._next is None:
            await self._catch_up()
            if self._next is None:
                self._blind_from = number
        self._published = number
        if self._next is not None and number > self._next:
            await self._fill_gap(number)
        if self._next is None or number >= self._next:
            await self._append(number, payload)

    async def _fill_gap(self, number: int) -> None:
        self._stats.gaps += 1
        await self._catch_up()
        if self._next is None or number > self._next:
            await self._lost(number)
            self._blind_from = number

    async def _catch_up(self) -> None:
        """Take from the engine's buffer what has not arrived. Without an answer nothing changes."""
        endpoint = self._config.replay_endpoint
        if endpoint is None:
            return
        await self._hand_over()
        stalls = 0
        while stalls < STALLS:
            position = self._next
            try:
                if await self._replay(endpoint):
                    self._patience_s = self._silence_s
                    return
            except (TimeoutError, BadFrames, zmq.ZMQError) as error:
                first = self._patience_s == self._silence_s
                log.log(logging.INFO if first else logging.DEBUG, "no replay from %s: %s", endpoint, error)
            stalls += self._next == position
        self._patience_s = min(2 * self._patience_s, MAX_SILENCE_S)

    async def _replay(self, endpoint: str) -> bool:
        """Ask the buffer once, from the last known batch on; False if it must be asked again.

        That batch is asked for again because its payload tells whether this is still the same process. All is asked for
        where the buffer may have what came before the first batch known.
        """
        known = self._next
        answers = 0
        first = 0 if known is None or self._blind_from else max(0, known - 1)
        async with contextlib.aclosing(self._ask(endpoint, first)) as replay:
            async for number, payload in replay:
                self._replays = True
                if known is not None and number < known - 1:  # only if all was asked for
                    if number < self._blind_from:
                        self._blind_from = 0
                        await self._sink.begun_too_late()
                        return True
                    continue
                answers += 1
                if known is not None and answers == 1:
                    if number == known - 1 and payload != self._last:
                        await self._restarted()
                        return False
                    if number > known:
                        await self._lost(number)
                if self._next is not None and number > self._next:
                    return False  # the engine dropped part of the answer
                if self._next is None or number == self._next:
                    self._stats.replayed += 1
                    await self._append(number, payload)
        self._blind_from = 0
        await self._hand_over()
        if known is not None and not answers and self._replays:
            await self._restarted()  # its buffer had the last known batch and does not have it now
            return False
        return True

    async def _ask(self, endpoint: str, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the batches that the buffer has from number ``first`` on.

        Raises:
            TimeoutError: the engine does not answer, or not to the end.
            BadFrames: it answers something else.
        """
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.rcvhwm = QUEUED_MESSAGES
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.ipv6 = "[" in endpoint  # an IPv6 address
            socket.connect(endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while messages := await _receive(socket, REPLAY_TIMEOUT_S):
                for frames in messages:
                    answer = parse_replay(frames)
                    if answer is None:
                        return
                    yield answer
        raise TimeoutError("no answer")

    async def _append(self, number: int, payload: bytes) -> None:
        if self._next is None and number > 0:
            await self._sink.joined_late()
        self._next = number + 1
        self._last = payload
        self._batches.append(payload)
        self._batches_bytes += len(payload)
        if len(self._batches) >= BURST or self._batches_bytes >= BURST_BYTES:
            await self._hand_over()

    async def _hand_over(self) -> None:
        if self._batches:
            batches = self._batches
            self._drop_batches()
            await self._sink.take(batches)

    def _drop_batches(self) -> None:
        self._batches = []
        self._batches_bytes = 0

    async def _lost(self, number: int) -> None:
        """Go on with batch ``number``, without those before."""
        self._stats.lost += 1
        self._drop_batches()
        self._next = number
        await self._sink.lost()

    async def _restarted(self) -> None:
        self._stats.restarts += 1
        self._drop_batches()
        self._next = None
        self._published = -1
        self._replays = False
        self._blind_from = 0
        await self._sink.restarted()


async def _receive(socket: zmq.asyncio.Socket, timeout_s: float) -> list[list[bytes]]:
    """Wait for messages; return those that are there, ``BURST`` at most, or none after ``timeout_s``."""
    if not await socket.poll(round(timeout_s * 1000)):
        return []
    return _waiting(socket)


def _waiting(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """Return the messages that are there, without suspending."""
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    messages: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(messages) < BURST:
            messages.append(plain.recv_multipart(zmq.NOBLOCK))
    return messages
