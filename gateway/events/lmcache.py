"""What LMCache's multi-process servers tell their coordinator of the chunks they hold, in JSON over HTTP.

``{"batches": [{instance_id, incarnation, seq, event_type, tier, backend, shared, entries: [{key: {chunk_hash_hex,
model_name, kv_rank, object_group_id, cache_salt}, token_ids, token_offset}]}]}``; ``seq`` counts from 1 in each
incarnation. An entry is one chunk of tokens at an offset in its prompt; what comes before it is not named, so it must
follow on the entry ahead of it or begin a prompt. The first tensor-parallel rank and the first group of a hybrid model
stand for all.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from gateway.events.decode import Hash, Removed, Stored
from policies.base import Tier

LOWER_TIERS: Final = (Tier.HOST, Tier.DISK, Tier.REMOTE)
"""Where LMCache keeps chunks."""


class BadDirectoryEvents(ValueError):
    """A body that does not follow the protocol; the message says where."""


class Key(msgspec.Struct, gc=False):
    """What a chunk is called."""

    chunk_hash_hex: str
    model_name: str = ""
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str | None = None


class Entry(msgspec.Struct, gc=False):
    """A chunk. Removals need not describe it."""

    key: Key
    token_ids: list[int] | None = None
    token_offset: int = 0


class DirectoryBatch(msgspec.Struct):
    """What one server has done to one tier.

    Attributes:
        instance_id: which server; kvway takes it for the name of the worker it serves.
        incarnation: which life of it.
        seq: number of the batch in that life, from 1.
        event_type: ``store``, ``delete``, ``access`` or ``config``.
        tier: ``l1`` (memory) or ``l2`` (a backend).
        backend: ``dram``, ``fs``, ``valkey`` …
        shared: whether other servers read it too.
        entries: the chunks.
    """

    instance_id: str
    incarnation: int | str
    seq: int
    event_type: str
    tier: str = "l1"
    backend: str = ""
    shared: bool = False
    entries: list[Entry] = []

    def where(self) -> Tier:
        """Return the tier as a router sees it."""
        return tier_of(self.tier, self.backend, self.shared)

    def events(self) -> tuple[list[Stored | Removed], int]:
        """Return what happened, and the number of entries that cannot be placed.

        Raises:
            BadDirectoryEvents: a token id does not fit 32 bits.
        """
        entries = [entry for entry in self.entries if entry.key.kv_rank == entry.key.object_group_id == 0]
        if self.event_type == "delete":
            names = [self._name(entry) for entry in entries]
            return ([Removed(names, self.where())] if names else []), 0
        if self.event_type != "store":
            return [], 0
        stored: list[Stored | Removed] = []
        skipped, end, before = 0, 0, None
        for entry in entries:
            tokens, name = entry.token_ids or [], self._name(entry)
            if entry.token_offset == 0:
                end, before = 0, None
            if entry.token_offset != end or not tokens:
                skipped += 1
                end = -1  # nothing can follow on it
                continue
            stored.append(_stored(entry, tokens, name, before, self.where()))
            end, before = entry.token_offset + len(tokens), name
        return stored, skipped

    def _name(self, entry: Entry) -> Hash:
        """Return what a chunk in this backend is called, which no engine's hash can equal.

        Another backend may be of the same tier, and go on holding what this one drops. The salt is no part of LMCache's
        own hash.
        """
        return f"lmcache:{self.backend}:{entry.key.cache_salt or ''}:{entry.key.chunk_hash_hex}"


def tier_of(tier: str, backend: str, shared: bool) -> Tier:
    """Return what a router calls one of LMCache's tiers; see ``DirectoryBatch``."""
    if tier == "l1":
        return Tier.HOST
    return Tier.DISK if backend == "fs" and not shared else Tier.REMOTE


class _Body(msgspec.Struct):
    batches: list[DirectoryBatch]


_decode = msgspec.json.Decoder(_Body).decode


def decode_directory(body: bytes) -> list[DirectoryBatch]:
    """Read the body of ``POST /events``.

    Raises:
        BadDirectoryEvents: it has another shape.
    """
    try:
        return _decode(body).batches
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDirectoryEvents(f"not events of an LMCache server: {error}") from None


def _stored(entry: Entry, tokens: list[int], name: Hash, before: Hash | None, tier: Tier) -> Stored:
    try:
        packed = array("I", tokens).tobytes()
    except OverflowError as error:
        raise BadDirectoryEvents(f"token ids: {error}") from None
    salt = entry.key.cache_salt or None
    return Stored([name], before, packed, len(tokens), tier, salt=None if before else salt)
