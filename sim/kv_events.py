"""KV cache events on the wire, as vLLM 0.32 publishes them over ZMQ.

A PUB socket carries ``[topic, sequence number, payload]``: the number is 8 bytes big-endian and counts batches from 0,
the payload is the msgpack array ``[time, events, data-parallel rank]``. A ROUTER socket replays past batches to whoever
sends ``[empty, first sequence number]``, one answer per batch, then an end marker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
import zmq
import zmq.asyncio

from policies.base import Tier
from sim.cache import BlockRemoved, BlocksStored, CacheEvent

EventFormat = Literal["map", "array"]
ReplayFormat = Literal["topic", "plain"]

MEDIUM: Final[Mapping[Tier, str]] = MappingProxyType({Tier.HBM: "GPU", Tier.HOST: "CPU"})
BUFFERED_BATCHES: Final = 10_000
END_OF_REPLAY: Final = b"\xff" * 8
_RANK: Final = 0
_GROUP: Final = 0


def event_map(event: CacheEvent, block_size: int, lora_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return an event as vLLM's map, keys in its order.

    Args:
        event: from the cache.
        block_size: tokens per block.
        lora_ids: number of each adapter, for the deprecated field ``lora_id``.
    """
    if isinstance(event, BlocksStored):
        return {
            "type": "BlockStored",
            "block_hashes": list(event.hashes),
            "parent_block_hash": event.parent,
            "token_ids": event.tokens.tolist(),
            "block_size": block_size,
            "lora_id": lora_ids.get(event.lora) if event.lora else None,
            "medium": MEDIUM[event.tier],
            "lora_name": event.lora,
            "extra_keys": _extra_keys(event),
            "group_idx": _GROUP,
            "kv_cache_spec_kind": "full_attention",
        }
    if isinstance(event, BlockRemoved):
        return {
            "type": "BlockRemoved",
            "block_hashes": [event.hash],
            "medium": MEDIUM[event.tier],
            "group_idx": _GROUP,
        }
    return {"type": "AllBlocksCleared"}


def _extra_keys(event: BlocksStored) -> list[list[str] | None]:
    """Return what distinguishes each block besides its tokens: the adapter always, the salt at the root only."""
    every = [event.lora] if event.lora else []
    first = every + ([event.salt] if event.salt else [])
    return [(every if at else first) or None for at in range(len(event.hashes))]


def encode_batch(
    events: Iterable[CacheEvent],
    at: float,
    block_size: int,
    lora_ids: Mapping[str, int] = MappingProxyType({}),
    event_format: EventFormat = "map",
) -> bytes:
    """Return the payload of one message.

    Args:
        events: in order.
        at: Unix time in seconds.
        block_size: tokens per block.
        lora_ids: number of each adapter.
        event_format: ``map`` since vLLM 0.26, ``array`` before: the same values in the same order.
    """
    maps = [event_map(event, block_size, lora_ids) for event in events]
    shaped: list[Any] = maps if event_format == "map" else [list(one.values()) for one in maps]
    return msgspec.msgpack.encode([at, shaped, _RANK])


class EventPublisher:
    """Publishes batches of cache events and replays past ones.

    Args:
        block_size: tokens per block.
        endpoint: ZMQ endpoint of the PUB socket; port 0 takes any.
        replay_endpoint: ZMQ endpoint of the ROUTER socket, None for no replay.
        topic: first frame of every message.
        event_format: shape of an event.
        replay_format: ``topic`` has the topic in replayed messages (4 frames, since vLLM 0.26), ``plain`` has not (3).
        connect: connect the PUB socket to a bound subscriber instead of binding it.
        lora_ids: number of each adapter.
    """

    def __init__(
        self,
        block_size: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        event_format: EventFormat = "map",
        replay_format: ReplayFormat = "topic",
        connect: bool = False,
        lora_ids: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._block_size = block_size
        self._topic = topic.encode()
        self._event_format = event_format
        self._replay_format = replay_format
        self._lora_ids = lora_ids
        self._sent: deque[bytes] = deque(maxlen=BUFFERED_BATCHES)
        self._next = 0
        self._context = zmq.Context()
        # The PUB socket is a plain one: sending never waits, what a slow subscriber does not take is dropped.
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER) if replay_endpoint else None
        try:
            if connect:
                self._pub.ipv6 = "[" in endpoint
                self._pub.connect(endpoint)
                self.endpoint = endpoint
            else:
                self.endpoint = _bind(self._pub, endpoint)
            self.replay_endpoint = None
            if self._router is not None and replay_endpoint:
                self._router.set_hwm(0)  # a replay is as long as the buffer; at a high-water mark it would lose batches
                self.replay_endpoint = _bind(self._router, replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, events: list[CacheEvent]) -> None:
        """Send one batch; none for no events."""
        if not events:
            return
        payload = encode_batch(events, time.time(), self._block_size, self._lora_ids, self._event_format)
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._sent.append(payload)
        self._next += 1

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled; malformed ones are ignored, as vLLM does."""
        if self._router is None:
            return
        with_topic = self._replay_format == "topic"
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            oldest = self._next - len(self._sent)
            begin = min(max(oldest, int.from_bytes(first, "big")), self._next)
            for sequence, payload in enumerate(list(self._sent)[begin - oldest :], begin):
                head = [client, b"", self._topic] if with_topic else [client, b""]
                await self._router.send_multipart([*head, sequence.to_bytes(8, "big"), payload])
            head = [client, b"", b""] if with_topic else [client, b""]
            await self._router.send_multipart([*head, END_OF_REPLAY, b""])

    def close(self) -> None:
        """Close the sockets; what was not yet delivered is lost."""
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()


def _bind(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Bind and return the endpoint, with the port that the system chose in place of port 0."""
    socket.ipv6 = "[" in endpoint
    socket.bind(endpoint)
    if not endpoint.endswith(":0"):
        return endpoint
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{endpoint.removesuffix('0')}{port}"
