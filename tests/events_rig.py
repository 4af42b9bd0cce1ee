"""What tests of KV events share: events as engines write them, a naive view of the outcome, and a real publisher."""

from __future__ import annotations

import asyncio
import inspect
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from gateway.events.changes import Changes
from gateway.tasks import spawn, stop
from policies.base import Tier
from policies.chunks import ChunkHasher

MODEL = "tiny"


def tokens(n: int, start: int = 100) -> list[int]:
    return list(range(start, start + n))


def packed(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


def stored(hashes: Sequence[Any], ids: Sequence[int], parent: Any = None, medium: Any = "GPU", **fields: Any) -> dict:
    """Return a BlockStored event as a current vLLM publishes it."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(ids),
        "block_size": len(ids) // len(hashes),
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event | fields


def removed(hashes: Sequence[Any], medium: Any = "GPU", **fields: Any) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": 0} | fields


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, at: Any = 1.5) -> bytes:
    """Return the payload of one message."""
    return msgspec.msgpack.encode([at, list(events), 0])


class NaiveIndex:
    """The chunks that one slot holds, tier by tier."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}

    def apply(self, changes: Changes) -> None:
        if changes.cleared:
            for chunks in self.held.values():
                chunks.clear()
        for run in changes.stored:
            assert not self.held[run.tier] & set(run.chunks), "stored twice"
            self.held[run.tier].update(run.chunks)
        for run in changes.removed:
            assert self.held[run.tier] >= set(run.chunks), "removed what was not there"
            self.held[run.tier].difference_update(run.chunks)

    def tiers(self, chunk: bytes) -> set[Tier]:
        return {tier for tier, chunks in self.held.items() if chunk in chunks}

    def run(self, chunks: Iterable[bytes]) -> int:
        """Return how many leading chunks are held in any tier."""
        count = 0
        for chunk in chunks:
            if not self.tiers(chunk):
                break
            count += 1
        return count


def chunks_of(
    hasher: ChunkHasher, ids: Sequence[int], lora: str | None = None, salt: str | None = None, model: str = MODEL
) -> list[bytes]:
    """Return a prompt's chunks."""
    return hasher.chain(hasher.root(model, lora, salt), packed(ids))


class Publisher:
    """An engine's two sockets with the engine's own framing; which messages get lost is up to the test.

    Args:
        buffer: past batches that are kept for replay.
        with_topic: answer replays with 4 frames instead of 3.
        replay: whether there is a replay socket at all.
        connect_to: connect to a bound subscriber instead of binding.
        endpoints: bind to those of an earlier publisher.
        replay_hwm: messages that the replay socket queues before it drops the rest, as ZMQ has it.
    """

    def __init__(
        self,
        buffer: int = 10_000,
        with_topic: bool = True,
        replay: bool = True,
        connect_to: str | None = None,
        endpoints: tuple[str, str] | None = None,
        replay_hwm: int = 1000,
    ) -> None:
        self._with_topic = with_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB socket that also says when somebody subscribes
        self._router = self._context.socket(zmq.ROUTER)
        self._router.sndhwm = replay_hwm
        endpoint, replay_endpoint = endpoints or ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self._pub.ipv6 = self._router.ipv6 = "[" in endpoint
        if connect_to is None:
            self._pub.bind(endpoint)
        else:
            self._pub.connect(connect_to)
        self.endpoint = self._pub.last_endpoint.decode()
        self._router.bind(replay_endpoint)
        self.replay_endpoint = self._router.last_endpoint.decode() if replay else None
        self.next = 0
        self.replays_asked: list[int] = []
        self.left_out_once: set[int] = set()  # numbers that the next replay lacks
        self.silent = False  # whether replays are not answered
        self.subscribed = asyncio.Event()
        self._serving = [spawn(self._serve(), "replay"), spawn(self._welcome(), "subscriptions")]

    async def publish(self, *events: Any, drop: bool = False, payload: bytes | None = None) -> None:
        """Publish one batch; ``drop`` loses it on the way, the buffer has it all the same."""
        await self.publish_payload(batch(*events) if payload is None else payload, drop)

    async def publish_payload(self, payload: bytes, drop: bool = False) -> None:
        if not drop:
            await self._pub.send_multipart([b"kv@test", self.next.to_bytes(8, "big"), payload])
        self._buffer.append((self.next, payload))
        self.next += 1

    async def send_raw(self, *frames: bytes) -> None:
        """Send something that is no batch."""
        await self._pub.send_multipart(frames)

    async def close(self) -> None:
        await stop(*self._serving)
        self._context.destroy(linger=0)

    async def _welcome(self) -> None:
        while True:
            await self._pub.recv()
            self.subscribed.set()

    async def _serve(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            start = int.from_bytes(first, "big")
            self.replays_asked.append(start)
            if self.silent:
                continue
            topic = [b"kv@test"] if self._with_topic else []
            left_out, self.left_out_once = self.left_out_once, set()
            for number, payload in list(self._buffer):
                if number >= start and number not in left_out:
                    await self._router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
            end = [b""] if self._with_topic else []
            await self._router.send_multipart([client, b"", *end, b"\xff" * 8, b""])


def tokens_by_tier(by_tier: np.ndarray) -> dict[Tier, int]:
    """Return one row of ``Residency.by_tier`` without its zeros."""
    return {tier: int(count) for tier, count in zip(Tier, by_tier, strict=True) if count}


def free_endpoint() -> str:
    """Return a loopback endpoint that nobody is bound to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def without_ipv6() -> bool:
    """Return whether this machine has no IPv6 loopback."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return False
    except OSError:
        return True


async def until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    """Wait until ``condition`` holds; it may be a coroutine function."""
    async with asyncio.timeout(within_s):
        while True:
            met = condition()
            if await met if inspect.isawaitable(met) else met:
                return
            await asyncio.sleep(0.005)
