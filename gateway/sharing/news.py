"""What a replica tells the others: what it has in flight, and which prompts it has sent where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec
import numpy as np

from gateway.events.drops import Dropped
from gateway.events.lmcache import DirectoryBatch
from gateway.fleet.registry import Registry, Worker
from gateway.index.base import Speculation
from policies.base import COLUMNS, FleetView

LOAD_COLUMNS: Final = ("pending_prefill_tokens", "pending_prefill_s", "running", "decode_tokens")
"""The columns of a fleet view that replicas add up."""

LOAD_ROWS: Final = [COLUMNS.index(column) for column in LOAD_COLUMNS]
NO_LOAD: Final = (0.0, 0.0, 0.0, 0.0)

MAX_CHUNKS: Final = 65_536
"""Bound on the chunks in one piece of news, a megabyte; prompts beyond it are not told."""

MAX_DROPPED: Final = 16_384
"""Bound on the blocks dropped from pools, in one piece of news; with more, the pools begin anew."""

MAX_NOTICES: Final = 4096
"""Bound on what LMCache says of others' requests, in one piece of news."""

Load = tuple[float, float, float, float]
"""One worker's ``LOAD_COLUMNS``, as counted by one replica."""


class Prompt(msgspec.Struct, array_like=True):
    """A prompt on its way to a worker; ``number`` is what its replica calls it."""

    number: int
    worker: str
    chunks: Sequence[bytes]


class News(msgspec.Struct, array_like=True):
    """One message.

    Attributes:
        replica: who tells it.
        whole: everything that has any load is in ``loads`` and every prompt on its way in ``live``, so that whoever
            missed a message is right again. Otherwise ``loads`` has what changed.
        loads: worker → its load; whole numbers, not differences.
        begun: prompts dispatched since the last message.
        settled: numbers of prompts that have been prefilled.
        cancelled: numbers of prompts that were not.
        live: numbers of all prompts on their way; empty unless ``whole``.
        leaving: the replica takes no new requests and wants no workers.
        moved: it has claimed or given up a worker, or a worker has another slot.
        written: requests of other replicas whose KV LMCache says is written; one entry per rank.
        number: counts the messages of a replica, so that a loss shows.
        dropped: what is gone from shared pools.
        dropped_since: pool → since when all that was dropped is in ``dropped``, seconds; where some replica asked.
        asks: the replica has not heard what was dropped before.
        directory: what LMCache's servers of workers say that other replicas follow. It goes at once, with no number and
            nothing else, so that a server's batches stay in order.
    """

    replica: str
    whole: bool
    loads: dict[str, Load]
    begun: Sequence[Prompt] = ()
    settled: Sequence[int] = ()
    cancelled: Sequence[int] = ()
    live: Sequence[int] = ()
    leaving: bool = False
    moved: bool = False
    written: Sequence[str] = ()
    number: int = 0
    dropped: Sequence[Dropped] = ()
    dropped_since: dict[str, float] = {}
    asks: bool = False
    directory: Sequence[DirectoryBatch] = ()


class AnnouncedPrompt:
    """A speculation that the other replicas hear of; see ``gateway.index.base.Speculation``."""

    __slots__ = ("_number", "_outbox", "_speculation")

    def __init__(self, outbox: Outbox, number: int, speculation: Speculation) -> None:
        self._outbox = outbox
        self._number = number
        self._speculation = speculation

    def answered(self) -> None:
        """The worker has begun to answer; the others do not hear of it."""
        self._speculation.answered()

    def settle(self, now: float) -> None:
        """The worker has prefilled the prompt."""
        self._outbox.ended(self._number, prefilled=True)
        self._speculation.settle(now)

    def cancel(self) -> None:
        """The prompt did not reach its prefill."""
        self._outbox.ended(self._number, prefilled=False)
        self._speculation.cancel()


class Outbox:
    """Collects what there is to tell until ``take`` is called.

    Loads are not reported by whoever counts them: the fleet view is compared with what was told last, so that the
    request path pays nothing for them.

    Args:
        replica: who we are.
        registry: whose fleet view has our load.

    Attributes:
        open: whether anybody listens; prompts are not collected otherwise.
        leaving: told with everything else.
        moved: told once, with the next message.
        asks: likewise.
        number: of the next message.
    """

    def __init__(self, replica: str, registry: Registry) -> None:
        self._replica = replica
        self._registry = registry
        self._numbers = count()
        self._live: set[int] = set()
        self._begun: dict[int, Prompt] = {}
        self._begun_chunks = 0
        self._settled: list[int] = []
        self._cancelled: list[int] = []
        self._written: list[str] = []
        self._dropped: list[Dropped] = []
        self._dropped_blocks = 0
        self._remembered: tuple[list[Dropped], dict[str, float]] = [], {}
        self._told_fleet: FleetView | None = None
        self._told = np.zeros((len(LOAD_ROWS), 0))
        self.open = False
        self.leaving = False
        self.moved = False
        self.asks = False
        self.number = 0

    def announce(self, worker: Worker, chunks: Sequence[bytes], speculation: Speculation) -> Speculation:
        """Tell of a prompt sent to ``worker``, and of its end when the speculation returned is settled or cancelled."""
        if not self.open or self._begun_chunks + len(chunks) > MAX_CHUNKS:
            return speculation
        number = next(self._numbers)
        self._begun[number] = Prompt(number, worker.name, chunks)
        self._begun_chunks += len(chunks)
        self._live.add(number)
        return AnnouncedPrompt(self, number, speculation)

    def ended(self, number: int, prefilled: bool) -> None:
        """A prompt is no longer on its way."""
        self._live.discard(number)
        if prefilled:
            self._settled.append(number)
        elif number in self._begun:  # nobody has heard of it
            self._begun_chunks -= len(self._begun.pop(number).chunks)
        else:
            self._cancelled.append(number)

    def pass_on(self, request_id: str) -> None:
        """Tell that the KV of a request is written, which is one of another replica's."""
        if self.open and len(self._written) < MAX_NOTICES:
            self._written.append(request_id)

    def dropped(self, dropped: Dropped) -> None:
        """Tell what is gone from a pool, even if nobody listens as yet."""
        self._dropped.append(dropped)
        self._dropped_blocks += 1 if dropped.blocks is None else len(dropped.blocks)
        if self._dropped_blocks > MAX_DROPPED:
            last = {each.pool: each.at for each in sorted(self._dropped, key=lambda each: each.at)}
            self._dropped = [Dropped(pool, at, None) for pool, at in last.items()]
            self._dropped_blocks = len(last)

    def remember(self, dropped: list[Dropped], since: dict[str, float]) -> None:
        """Tell all that is known to have been dropped; see ``EventFeeds.drops``."""
        self._remembered = dropped, since

    def take(self, whole: bool) -> News | None:
        """Return what is new, or everything; None if there is nothing to tell."""
        fleet = self._registry.fleet
        whole = whole or fleet is not self._told_fleet
        loads = fleet.state[LOAD_ROWS]
        changed = loads.any(0) if whole else (loads != self._told).any(0)
        rows = np.flatnonzero(changed).tolist()
        self._told_fleet, self._told = fleet, loads
        ends = self._settled or self._cancelled or self._written
        remembered, since = self._remembered
        if not (whole or rows or self._begun or ends or self.moved or self._dropped or since or self.asks):
            return None
        news = News(
            replica=self._replica,
            whole=whole,
            loads=dict(zip([fleet.names[row] for row in rows], map(tuple, loads.T[rows].tolist()), strict=True)),
            begun=list(self._begun.values()),
            settled=self._settled,
            cancelled=self._cancelled,
            live=sorted(self._live) if whole else (),
            leaving=self.leaving,
            moved=self.moved,
            written=self._written,
            number=self.number,
            dropped=[*remembered, *self._dropped],
            dropped_since=since,
            asks=self.asks,
        )
        self.moved = self.asks = False
        self.number += 1
        self._dropped, self._dropped_blocks, self._remembered = [], 0, ([], {})
        self.drop()
        return news

    def drop(self) -> None:
        """Forget what has not been told yet, loads and pools aside."""
        self._begun, self._begun_chunks, self._settled, self._cancelled, self._written = {}, 0, [], [], []


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(News).decode
