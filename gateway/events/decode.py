"""KV cache events of every engine and version, decoded into three types: ``Stored``, ``Removed`` and ``Cleared``.

vLLM and SGLang publish ``[topic, sequence number, payload]`` over ZMQ. The payload is a msgpack batch ``[time, events,
rank]``; batches and events have been arrays and maps, fields come and go, and a pool publishes the same events under
other names. So everything is decoded untyped, brought to one map per event, and only then read. What cannot be read is
counted and left out; it never takes its neighbours with it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from policies.base import Tier
from policies.chunks import TOKEN_BYTES

Hash = int | bytes | str
"""An engine's own name for a block: opaque here, and never compared across workers."""

_STORED_FIELDS: Final = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED_FIELDS: Final = ("type", "block_hashes", "medium", "group_idx", "locality", "ownership")
# Field order of the events that older engines publish as arrays.
_FIELDS: Final[Mapping[object, Sequence[str]]] = MappingProxyType(
    {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": ("type",)}
)
_MEDIA: Final[Mapping[str | None, Tier]] = MappingProxyType(
    {
        None: Tier.HBM,
        "GPU": Tier.HBM,
        "HBM": Tier.HBM,
        "DEVICE": Tier.HBM,
        "CPU": Tier.HOST,
        "CPU_PINNED": Tier.HOST,
        "DRAM": Tier.HOST,
        "HOST": Tier.HOST,
        "HOST_PINNED": Tier.HOST,
        "DISK": Tier.DISK,
        "FS": Tier.DISK,
        "NVME": Tier.DISK,
        "SSD": Tier.DISK,
        "STORAGE": Tier.DISK,
    }
)
# Groups of a hybrid model whose blocks, once stored, serve any later prompt that begins with the same tokens.
_PREFIX_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_U64: Final = (1 << 64) - 1
_MILLISECONDS: Final = 1e11  # as seconds, a time above this would lie after the year 5000
_END_OF_REPLAY: Final = b"\xff" * 8


class Stored(msgspec.Struct, gc=False):
    """Blocks that a tier now holds, one after the other.

    Attributes:
        hashes: the engine's block hashes, ``[n]``.
        parent: hash of the block before the first, None at the beginning of a prompt.
        tokens: their token ids as packed little-endian u32, ``4 * n * block_size`` bytes; empty where the engine names
            blocks without describing them.
        block_size: tokens per block.
        tier: where they lie.
        lora: adapter name; an adapter known only by number is called ``#<number>``.
        salt: cache salt, told with a prompt's first block only.
        extras: per block, ids of the multimodal items (or embeddings) that reach into it; None: there are none.
        group: number of the KV cache group in a hybrid model.
    """

    hashes: list[Hash]
    parent: Hash | None
    tokens: bytes
    block_size: int
    tier: Tier
    lora: str | None = None
    salt: str | None = None
    extras: list[tuple[bytes, ...]] | None = None
    group: int | None = None


class Removed(msgspec.Struct, gc=False):
    """Blocks that ``tier`` (None: every tier) no longer holds."""

    hashes: list[Hash]
    tier: Tier | None
    group: int | None = None


class Cleared(msgspec.Struct, gc=False):
    """The whole cache was reset."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, gc=False):
    """What one payload says.

    Attributes:
        time_s: when the engine published it, Unix seconds; 0 where it does not say.
        events: in order.
        bad: events that could not be read.
        skipped: events that are of no use here: unknown types, and groups that hold no reusable prefixes.
    """

    time_s: float
    events: list[Event]
    bad: int = 0
    skipped: int = 0


class BadFrames(ValueError):
    """A message, or a whole batch, that does not follow the protocol."""


def parse_publication(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence number and payload of a published message ``[topic, number, payload]``.

    Raises:
        BadFrames: it has another shape.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise BadFrames(f"a publication has 3 frames, the second of 8 bytes, not {[len(frame) for frame in frames]}")
    return int.from_bytes(frames[1], "big"), frames[2]


def parse_replay(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return sequence number and payload of a replayed message, None for the end marker.

    Answers are ``[empty, number, payload]`` up to vLLM 0.25 and ``[empty, topic, number, payload]`` since.

    Raises:
        BadFrames: it has another shape.
    """
    if len(frames) not in (3, 4) or len(frames[-2]) != 8:
        raise BadFrames(f"a replay answer has 3 or 4 frames, not {[len(frame) for frame in frames]}")
    if frames[-2] == _END_OF_REPLAY:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def decode_batch(payload: bytes) -> Batch:
    """Decode one payload.

    Raises:
        BadFrames: it is not a batch at all. A bad event inside a batch is counted instead.
    """
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise BadFrames(f"not msgpack: {error}") from None
    if isinstance(raw, dict):
        time_s, events = raw.get("ts", raw.get("timestamp")), raw.get("events")
    elif isinstance(raw, list) and len(raw) >= 2:
        time_s, events = raw[0], raw[1]
    else:
        raise BadFrames("a batch is a map or an array of at least two")
    if not isinstance(events, list):
        raise BadFrames("a batch has a list of events")
    batch = Batch(_seconds(time_s), [])
    for event in events:
        try:
            known = _event(event)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            batch.bad += 1
            continue
        if known is None:
            batch.skipped += 1
        else:
            batch.events.append(known)
    return batch


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    return value / 1000 if value > _MILLISECONDS else float(value)


def _event(raw: Any) -> Event | None:
    if isinstance(raw, dict):
        tag = raw.get("type") or raw["event_type"]
    elif isinstance(raw, list):
        tag = raw[0]
        raw = dict(zip(_FIELDS.get(tag, ()), raw, strict=False))
    else:
        raise TypeError("an event is a map or an array")
    read = _READERS.get(tag)
    return None if read is None else read(raw)


def _removed(raw: dict[str, Any]) -> Removed:
    everywhere = raw.get("medium") is None and raw.get("locality") != "REMOTE"
    return Removed(_hashes(raw), None if everywhere else _tier(raw), _number(raw.get("group_idx")))


def _cleared(_: dict[str, Any]) -> Cleared:
    return Cleared()


def _stored(raw: dict[str, Any]) -> Stored | None:
    if raw.get("kv_cache_spec_kind") not in _PREFIX_KINDS:
        return None
    hashes = _hashes(raw)
    parent = raw.get("parent_block_hash", raw.get("parent_hash"))
    if parent is not None:
        parent = _hash(parent)
    elif raw.get("base_block_idx"):
        return None  # blocks from the middle of a prompt that do not say of which
    tokens = _pack(raw.get("token_ids"))
    block_size = _number(raw.get("block_size")) or 0
    if tokens and len(tokens) != len(hashes) * block_size * TOKEN_BYTES:
        raise ValueError("token ids do not fill the blocks")
    stored = Stored(hashes, parent, tokens, block_size, _tier(raw), group=_number(raw.get("group_idx")))
    stored.lora = _text(raw.get("lora_name"))
    if stored.lora is None and (number := raw.get("lora_id")):
        stored.lora = f"#{number}"
    stored.salt = _text(raw.get("cache_salt") or raw.get("additional_salt"))
    keys = raw.get("extra_keys")
    if keys and any(keys):
        _read_extra_keys(stored, keys)
    return stored


def _read_extra_keys(stored: Stored, keys: list[Any]) -> None:
    """Take apart what the engine hashes besides tokens, per block and in this order.

    The adapter's name (every block), ``[id, offset]`` of the multimodal items in the block, the cache salt (first block
    of a prompt), a digest of prompt embeddings.
    """
    if len(keys) != len(stored.hashes):
        raise ValueError("extra keys do not match the blocks")
    extras: list[tuple[bytes, ...]] = []
    for number, key in enumerate(keys):
        items = list(key or ())
        if items and items[0] == stored.lora:
            del items[0]
        ids = []
        for item in items:
            if isinstance(item, list):
                ids.append(str(item[0]).encode())
            elif isinstance(item, bytes):
                ids.append(item)
            elif number == 0 and stored.parent is None:
                stored.salt = _text(item)
            else:
                raise ValueError("a cache salt belongs to a first block")
        extras.append(tuple(ids))
    if any(extras):
        stored.extras = extras


def _hashes(raw: dict[str, Any]) -> list[Hash]:
    hashes = raw["block_hashes"] if "block_hashes" in raw else raw["seq_hashes"]
    if not isinstance(hashes, list):
        raise TypeError("block hashes are a list")
    return [_hash(value) for value in hashes]


def _hash(value: Any) -> Hash:
    """Check a hash's type. SGLang's integers are signed: made unsigned, the same hash has one form everywhere."""
    if type(value) is int:
        return value & _U64
    if isinstance(value, bytes | str):
        return value
    raise TypeError("block hashes are integers, bytes or text")


def _pack(tokens: Any) -> bytes:
    if not tokens:
        return b""
    if isinstance(tokens[0], list):
        tokens = [pair[0] for pair in tokens]  # SGLang's speculative decoding caches pairs (token, next token)
    return array("I", tokens).tobytes()


def _tier(raw: dict[str, Any]) -> Tier:
    """Return where blocks lie; without a medium that is HBM, and a medium unknown here counts as the slowest tier."""
    if raw.get("locality") == "REMOTE":
        return Tier.REMOTE
    medium: Any = raw.get("medium")
    tier = _MEDIA.get(medium)
    return _MEDIA.get(medium.upper(), Tier.REMOTE) if tier is None else tier


def _number(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    raise TypeError("not an integer")


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise TypeError("not text")


# By the names of vLLM and SGLang, and by those that Mooncake gives the same events.
_READERS: Final[Mapping[object, Callable[[dict[str, Any]], Event | None]]] = MappingProxyType(
    {
        "BlockStored": _stored,
        "BlockRemoved": _removed,
        "AllBlocksCleared": _cleared,
        "stored": _stored,
        "removed": _removed,
        "cleared": _cleared,
    }
)
