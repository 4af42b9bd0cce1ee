"""The block cache against a naive one: plain lists, every rule written out the slow way."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from policies.base import Tier
from sim.cache import AllCleared, BlockCache, BlockChain, BlocksStored, hash_blocks

SIZE = 2
NUM_BLOCKS = 12
HOST_BLOCKS = 8
MAX_LENGTH = 8  # blocks of the longest chain


def chain_of(branches: list[int]) -> BlockChain:
    """A chain of which equal branches are equal blocks, as long as everything before them is equal too."""
    return hash_blocks(array("I", [token for branch in branches for token in (branch, branch)]), SIZE, "model")


chains = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LENGTH).map(chain_of)


class NaiveCache:
    """What vLLM's block pool does, on lists."""

    def __init__(self) -> None:
        self.queue = list(range(1, NUM_BLOCKS))
        self.users = dict.fromkeys(self.queue, 0)
        self.hashes: dict[int, int] = {}  # block → hash, in the order in which blocks were cached
        self.host: list[int] = []  # hashes, least recently used first

    def hit(self, chain: BlockChain) -> tuple[list[int], int]:
        blocks = []
        for block_hash in chain.hashes:
            same = [block for block, known in self.hashes.items() if known == block_hash]
            if not same:
                break
            blocks.append(same[0])
        host = 0
        for block_hash in chain.hashes[len(blocks) :]:
            if block_hash not in self.host:
                break
            host += 1
        return blocks, host

    def use(self, blocks: list[int], new: int) -> list[int] | None:
        idle = [block for block in blocks if self.users[block] == 0]
        if len(idle) + new > len(self.queue):
            return None
        for block in idle:
            self.queue.remove(block)
        fresh, self.queue = self.queue[:new], self.queue[new:]
        for block in fresh:
            self.hashes.pop(block, None)
        for block in blocks + fresh:
            self.users[block] += 1
        return blocks + fresh

    def cache(self, chain: BlockChain, blocks: list[int], first: int, last: int) -> None:
        run = list(chain.hashes[first:last])
        self.hashes.update(zip(blocks[first:last], run, strict=True))
        self.touch(run)
        new = [block_hash for block_hash in run if block_hash not in self.host][:HOST_BLOCKS]
        self.host = [*self.host, *reversed(new)][-HOST_BLOCKS:]

    def free(self, blocks: list[int]) -> None:
        idle = []
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                idle.append(block)
        never_full = [block for block in idle if block not in self.hashes]
        self.queue = never_full + self.queue + [block for block in idle if block in self.hashes]
        self.touch([self.hashes[block] for block in blocks if block in self.hashes])

    def touch(self, run: list[int]) -> None:
        known = [block_hash for block_hash in reversed(run) if block_hash in self.host]
        self.host = [block_hash for block_hash in self.host if block_hash not in known] + known


class Sequence:
    """A sequence that uses blocks: ``committed`` of them are full, the last may not be."""

    def __init__(self, chain: BlockChain, blocks: list[int], committed: int) -> None:
        self.chain, self.blocks, self.committed = chain, blocks, committed


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, grow and go in any order."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(NUM_BLOCKS, SIZE, HOST_BLOCKS)
        self.naive = NaiveCache()
        self.heard = {Tier.HBM: Counter[int](), Tier.HOST: Counter[int]()}

    def commit(self, sequence: Sequence, last: int) -> None:
        if last > sequence.committed:
            self.cache.commit(sequence.chain, sequence.blocks, sequence.committed, last)
            self.naive.cache(sequence.chain, sequence.blocks, sequence.committed, last)
            sequence.committed = last

    @rule(target=live, chain=chains, partial=st.booleans())
    def begin(self, chain: BlockChain, partial: bool) -> object:
        hit = self.cache.lookup(chain, len(chain.hashes))
        naive_blocks, naive_host = self.naive.hit(chain)
        assert (list(hit.blocks), hit.host_blocks) == (naive_blocks, naive_host)
        new = len(chain.hashes) - len(hit.blocks) + partial
        expected = self.naive.use(naive_blocks, new)
        assert self.cache.fits(hit, new) == (expected is not None)
        if expected is None:
            return multiple()
        sequence = Sequence(chain, self.cache.allocate(new, hit), len(hit.blocks))
        assert sequence.blocks == expected
        self.commit(sequence, len(chain.hashes))
        return sequence

    @rule(sequence=live, branch=st.integers(0, 1))
    def grow(self, sequence: Sequence, branch: int) -> None:
        if len(sequence.blocks) == MAX_LENGTH + 1:
            return
        if len(sequence.blocks) == sequence.committed:
            expected = self.naive.use([], 1)
            if expected is not None:
                blocks = self.cache.allocate(1)
                assert blocks == expected
                sequence.blocks += blocks
            return
        tokens = array("I", [*sequence.chain.tokens, branch, branch])
        sequence.chain = hash_blocks(tokens, SIZE, "model")
        self.commit(sequence, sequence.committed + 1)

    @rule(sequence=consumes(live))
    def end(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        self.naive.free(sequence.blocks)

    @rule()
    def reset(self) -> None:
        idle = not any(self.naive.users.values())
        assert self.cache.reset() == idle
        if idle:
            self.naive.hashes.clear()
            self.naive.host.clear()

    @invariant()
    def whoever_follows_the_events_knows_what_is_held(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, AllCleared):
                for heard in self.heard.values():
                    heard.clear()
            elif isinstance(event, BlocksStored):
                assert len(event.tokens) == len(event.hashes) * SIZE
                self.heard[event.tier].update(event.hashes)
            else:
                self.heard[event.tier][event.hash] -= 1
                assert self.heard[event.tier][event.hash] >= 0
        assert +self.heard[Tier.HBM] == Counter(self.naive.hashes.values())
        assert +self.heard[Tier.HOST] == Counter(self.naive.host)

    @invariant()
    def free_blocks_are_those_without_users(self) -> None:
        assert self.cache.free_blocks == sum(users == 0 for users in self.naive.users.values())


CacheMachine.TestCase.settings = settings(stateful_step_count=40)
test_the_cache_does_what_a_naive_one_does = CacheMachine.TestCase
