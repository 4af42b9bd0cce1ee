"""The assembler against a naive model of a paged cache: residency must be exactly the model's, in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.events.assembler import Assembler
from gateway.events.decode import Cleared, Event, Removed, Stored
from policies.base import Tier
from policies.chunks import ChunkHasher
from tests.events_rig import MODEL, NaiveIndex, chunks_of, packed

CHUNK = 4
LENGTH = 24
SALTS = (None, "tenant")


PROMPTS = [
    (0,) * LENGTH,
    (0,) * 1 + (1,) * (LENGTH - 1),
    (0,) * 6 + (2,) * (LENGTH - 6),
    (0,) * 7 + (3,) * (LENGTH - 7),
    (0,) * 13 + (4,) * (LENGTH - 13),
    (0,) * 6 + (2,) * 11 + (5,) * (LENGTH - 17),
    (0,) * 6 + (6,) * (LENGTH - 6),
]


@dataclass(frozen=True)
class Block:
    """An engine block, identified by everything up to its end."""

    context: tuple[int, ...]
    salt: str | None
    size: int

    @property
    def hash(self) -> int:
        return hash((self.context, self.salt, self.size)) % 2**64

    @property
    def parent(self) -> Block | None:
        before = self.context[: -self.size]
        return Block(before, self.salt, self.size) if before else None


@dataclass
class PagedCache:
    """How many copies of each block an engine holds in each tier."""

    copies: Counter[tuple[Block, Tier]] = field(default_factory=Counter)

    def tiers(self, block: Block) -> set[Tier]:
        return {tier for tier in Tier if self.copies[block, tier]}

    def live(self) -> list[Block]:
        return list(dict.fromkeys(block for (block, _), count in self.copies.items() if count))

    def chunk_tiers(self, context: tuple[int, ...], salt: str | None, size: int) -> set[Tier]:
        """Return the tiers that hold the last chunk of ``context``: of any live blocks that it can rest on."""
        end = len(context)
        found: set[Tier] = set()
        for last in self.live():
            fits = last.salt == salt and last.context[:end] == context and len(last.context) - size < end
            if fits:
                stops = range((end - CHUNK) // size * size + size, len(last.context) + 1, size)
                blocks = [self.tiers(Block(last.context[:stop], salt, size)) for stop in stops]
                if all(blocks):
                    found |= set.intersection(*blocks) | {max(map(min, blocks))}
        return found


class PagedWorker:
    """A worker's cache, the events it publishes, and what the assembler makes of them."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.hasher = ChunkHasher(CHUNK)
        self.restart()

    def restart(self) -> None:
        self.cache = PagedCache()
        self.assembler = Assembler(self.hasher, MODEL)
        self.index = NaiveIndex()

    def see(self, events: Sequence[Event]) -> None:
        self.assembler.apply(events)
        self.index.apply(self.assembler.take())

    def store(self, prompt: int, salt: str | None, first: int, count: int, tier: Tier, order: int | None) -> None:
        """Store some blocks of a prompt: in one event, or in one event each and in any order."""
        stops = range(self.size, LENGTH + 1, self.size)[first : first + count]
        blocks = [Block(PROMPTS[prompt][:stop], salt, self.size) for stop in stops]
        known = set(self.cache.live())
        self.cache.copies.update((block, tier) for block in blocks)
        if order is None:
            self.see([self.stored(blocks, tier)] if blocks else [])
        else:
            # Copies made by offloading are announced without the salt.
            events = [self.stored([block], tier, anonymous=block in known and order % 2 == 0) for block in blocks]
            Random(order).shuffle(events)
            self.see(events)

    def stored(self, blocks: list[Block], tier: Tier, anonymous: bool = False) -> Stored:
        parent, salt = blocks[0].parent, None if anonymous else blocks[0].salt
        tokens = packed(token for block in blocks for token in block.context[-self.size :])
        hashes = [block.hash for block in blocks]
        return Stored(hashes, parent and parent.hash, tokens, self.size, tier, salt=None if parent else salt)

    def name(self, pick: int, tier: Tier) -> None:
        """Announce a live block without describing it."""
        if live := self.cache.live():
            block = live[pick % len(live)]
            self.cache.copies[block, tier] += 1
            self.see([Stored([block.hash], None, b"", 0, tier)])

    def remove(self, pick: int, count: int, tier: Tier | None) -> None:
        live = self.cache.live()
        blocks = {live[(pick + more) % len(live)] for more in range(count)} if live else set()
        for block in blocks:
            for one in Tier if tier is None else (tier,):
                self.cache.copies[block, one] = max(0, self.cache.copies[block, one] - 1)
        self.see([Removed([block.hash for block in blocks], tier)])

    def clear(self) -> None:
        self.cache = PagedCache()
        self.see([Cleared()])

    def check(self) -> None:
        for prompt in PROMPTS:
            for salt in SALTS:
                for number, chunk in enumerate(chunks_of(self.hasher, prompt, salt=salt), 1):
                    held = self.cache.chunk_tiers(prompt[: number * CHUNK], salt, self.size)
                    assert self.index.tiers(chunk) == held
                    if not held:
                        break


TIERS = st.sampled_from(Tier)
Action = Callable[[PagedWorker], None]


def _action(method: Callable[..., None], *arguments: st.SearchStrategy) -> st.SearchStrategy[Action]:
    return st.tuples(*arguments).map(lambda drawn: lambda worker: method(worker, *drawn))


SMALL = st.integers(0, 30)
ACTIONS = st.one_of(
    _action(
        PagedWorker.store,
        st.integers(0, len(PROMPTS) - 1),
        st.sampled_from(SALTS),
        st.integers(0, 3),
        st.integers(1, LENGTH),
        TIERS,
        st.none() | SMALL,
    ),
    _action(
        PagedWorker.store, SMALL.map(lambda n: n % len(PROMPTS)), st.none(), st.just(0), st.just(LENGTH), TIERS, SMALL
    ),
    _action(PagedWorker.remove, SMALL, st.integers(1, 6), st.none() | TIERS),
    _action(PagedWorker.name, SMALL, TIERS),
    _action(PagedWorker.clear),
    _action(PagedWorker.restart),
)


@given(st.sampled_from([1, 2, 3, 4, 8, 12]), st.lists(ACTIONS, max_size=25))
def test_residency_is_exactly_that_of_the_paged_cache(block_size, actions):
    worker = PagedWorker(block_size)
    for action in actions:
        action(worker)
        worker.check()


@given(st.sampled_from([1, 2, 3, 4, 8]), st.lists(ACTIONS, max_size=25))
def test_a_cache_that_empties_leaves_nothing_behind(block_size, actions):
    worker = PagedWorker(block_size)
    for action in actions:
        action(worker)
    while live := worker.cache.live():
        worker.remove(0, len(live), None)
    assert len(worker.assembler) == worker.assembler.orphans == 0
    assert not any(worker.index.held.values())
