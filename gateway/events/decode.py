"""KV cache events of every engine and version, decoded into three types: ``Stored``, ``Removed`` and ``Cleared``.

vLLM and SGLang publish ``[topic, sequence number, payload]`` over ZMQ. The payload is a msgpack batch ``[time, events,
rank]``. What they publish today is decoded at once into structs with their fields. But batches and events have been
arrays and maps, fields come and go, and a pool publishes the same events under other names: a batch that does not fit
is decoded untyped, and each of its events is brought into the same structs. What cannot be read is counted and left
out; it never takes its neighbours with it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from policies.base import Tier
from policies.chunks import TOKEN_BYTES, Medium

Hash = int | bytes | str
"""An engine's own name for a block: opaque here, and never compared across workers."""

_tier_of: Final = {
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
}.get
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
        extras: per block, the media that reach into it, from its own beginning; None: there are none.
        group: number of the KV cache group in a hybrid model.
    """

    hashes: list[Hash]
    parent: Hash | None
    tokens: bytes
    block_size: int
    tier: Tier
    lora: str | None = None
    salt: str | None = None
    extras: list[tuple[Medium, ...]] | None = None
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


class _StoredFields(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """``BlockStored`` as it is published: first the fields of older engines' arrays, in their order."""

    block_hashes: list[Any]  # ``Hash``, which is one type too many for a union of msgspec's
    parent_block_hash: Any = None
    token_ids: list[int | list[int]] | None = None
    block_size: int | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Any = None
    locality: str | None = None
    ownership: Any = None
    session_id: Any = None
    cache_salt: str | None = None
    additional_salt: str | None = None  # Mooncake's, as are those below
    parent_hash: Any = None
    base_block_idx: int | None = None


class _RemovedFields(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """``BlockRemoved`` as it is published."""

    block_hashes: list[Any]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _ClearedFields(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """``AllBlocksCleared`` as it is published."""


_Fields = _StoredFields | _RemovedFields | _ClearedFields


class _UsualBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch as it is published."""

    time: float
    events: list[_Fields]


_decode_usual: Final = msgspec.msgpack.Decoder(_UsualBatch).decode
# By the names of vLLM and SGLang, and by those that Mooncake gives the same events.
_FIELDS: Final[Mapping[object, type[_Fields]]] = MappingProxyType(
    {
        "BlockStored": _StoredFields,
        "BlockRemoved": _RemovedFields,
        "AllBlocksCleared": _ClearedFields,
        "stored": _StoredFields,
        "removed": _RemovedFields,
        "cleared": _ClearedFields,
    }
)


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
    events: list[Any]
    try:
        usual = _decode_usual(payload)
        batch, events = Batch(_seconds(usual.time), []), usual.events
    except (msgspec.MsgspecError, ValueError, RecursionError):
        batch, events = _decode_unusual(payload)
    known = batch.events
    for raw in events:
        try:
            event = _READERS.get(type(raw), _unusual)(raw)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            batch.bad += 1
            continue
        if event is None:
            batch.skipped += 1
        else:
            known.append(event)
    return batch


def _decode_unusual(payload: bytes) -> tuple[Batch, list[Any]]:
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
    return Batch(_seconds(time_s), []), events


def _seconds(value: object) -> float:
    if type(value) is float and 0 <= value <= _MILLISECONDS:
        return value
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    return value / 1000 if value > _MILLISECONDS else float(value)


def _unusual(raw: Any) -> Event | None:
    """Bring an event of another shape, or under other names, into the usual struct; None if its type is unknown."""
    if isinstance(raw, dict):
        kind = _FIELDS.get(raw.get("type") or raw["event_type"])
        values = raw if "block_hashes" in raw else raw | {"block_hashes": raw.get("seq_hashes")}
    elif isinstance(raw, list):
        kind = _FIELDS.get(raw[0])
        values = {} if kind is None else dict(zip(kind.__struct_fields__, raw[1:], strict=False))
    else:
        raise TypeError("an event is a map or an array")
    if kind is None:
        return None
    return _READERS[kind](msgspec.convert(values | {"type": kind.__struct_config__.tag}, kind))


def _removed(raw: _RemovedFields) -> Removed:
    everywhere = raw.medium is None and raw.locality != "REMOTE"
    return Removed(_hashes(raw.block_hashes), None if everywhere else _tier(raw), raw.group_idx)


def _cleared(_raw: _ClearedFields) -> Cleared:
    return Cleared()


def _stored(raw: _StoredFields) -> Stored | None:
    if raw.kv_cache_spec_kind not in _PREFIX_KINDS:
        return None
    parent = raw.parent_hash if raw.parent_block_hash is None else raw.parent_block_hash
    if parent is not None:
        parent = _hash(parent)
    elif raw.base_block_idx:
        return None  # blocks from the middle of a prompt that do not say of which
    hashes = _hashes(raw.block_hashes)
    tokens = _pack(raw.token_ids)
    block_size = raw.block_size or 0
    if tokens and len(tokens) != len(hashes) * block_size * TOKEN_BYTES:
        raise ValueError("token ids do not fill the blocks")
    lora = raw.lora_name or (f"#{raw.lora_id}" if raw.lora_id else None)
    salt = raw.cache_salt or raw.additional_salt or None
    stored = Stored(hashes, parent, tokens, block_size, _tier(raw), lora, salt, None, raw.group_idx)
    keys = raw.extra_keys
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
    extras: list[tuple[Medium, ...]] = []
    for number, key in enumerate(keys):
        items = list(key or ())
        if items and items[0] == stored.lora:
            del items[0]
        media: list[Medium] = []
        for item in items:
            if isinstance(item, list):
                name, offset = item
                media.append((str(name).encode(), int(offset)))
            elif isinstance(item, bytes):
                media.append((item, 0))
            elif number == 0 and stored.parent is None:
                stored.salt = _text(item)
            else:
                raise ValueError("a cache salt belongs to a first block")
        extras.append(tuple(media))
    if any(extras):
        stored.extras = extras


def _hashes(values: list[Any]) -> list[Hash]:
    if len(values) == 1:  # while an engine decodes
        return [_hash(values[0])]
    return [value & _U64 if type(value) is int else _hash(value) for value in values]


def _hash(value: Any) -> Hash:
    """Check a hash's type. SGLang's integers are signed: made unsigned, the same hash has one form everywhere."""
    if type(value) is int:
        return value & _U64
    if isinstance(value, bytes | str):
        return value
    raise TypeError("block hashes are integers, bytes or text")


def _pack(tokens: list[Any] | None) -> bytes:
    if not tokens:
        return b""
    if isinstance(tokens[0], list):
        tokens = [pair[0] for pair in tokens]  # SGLang's speculative decoding caches pairs (token, next token)
    return array("I", tokens).tobytes()


def _tier(raw: _StoredFields | _RemovedFields) -> Tier:
    """Return where blocks lie; without a medium that is HBM, and a medium unknown here counts as the slowest tier."""
    if raw.locality == "REMOTE":
        return Tier.REMOTE
    tier = _tier_of(raw.medium)
    return _tier_of(str(raw.medium).upper(), Tier.REMOTE) if tier is None else tier


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise TypeError("not text")


_READERS: Final[dict[type, Callable[[Any], Event | None]]] = {
    _StoredFields: _stored,
    _RemovedFields: _removed,
    _ClearedFields: _cleared,
}
