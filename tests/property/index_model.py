"""The naive index: a dict per slot, a list of speculations. What the real ones must agree with, at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import md5
from math import inf

from hypothesis import strategies as st

from policies.base import N_TIERS, Tier

TTL_S = 2.0
MAX_DEPTH = 5


def chunk(path: tuple[int, ...]) -> bytes:
    """Return the hash of the last chunk of ``path``; different paths, different chunks."""
    return md5(bytes(path)).digest()


def prompt(path: Sequence[int]) -> list[bytes]:
    return [chunk(tuple(path[: depth + 1])) for depth in range(len(path))]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Sent:
    slot: int
    chunks: list[bytes]
    forget_at: float = inf


@dataclass
class Model:
    clock: Clock
    held: dict[int, dict[bytes, set[Tier]]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    def wipe(self, slot: int) -> None:
        self.held[slot] = {}
        self.sent = [one for one in self.sent if one.slot != slot]

    def release(self, slot: int) -> None:
        self.wipe(slot)
        del self.held[slot]

    def store(self, slot: int, chunks: list[bytes], tier: Tier) -> None:
        for one in chunks:
            self.held[slot].setdefault(one, set()).add(tier)

    def remove(self, slot: int, chunks: list[bytes], tier: Tier | None) -> None:
        for one in chunks:
            self.held[slot].get(one, set()).difference_update(Tier if tier is None else {tier})

    def speculate(self, slot: int, chunks: list[bytes]) -> Sent:
        self.sent.append(Sent(slot, chunks))
        return self.sent[-1]

    def cancel(self, sent: Sent) -> None:
        self.sent = [one for one in self.sent if one is not sent]

    def settle(self, sent: Sent) -> None:
        sent.forget_at = self.clock.now + TTL_S

    def by_tier(self, chunks: list[bytes], slot: int, speculations: bool = True) -> list[int]:
        """Return the length of the leading run per tier, in chunks."""
        run = [0] * N_TIERS
        for one in chunks:
            tiers = set(self.held.get(slot, {}).get(one, ()))
            for sent in self.sent:
                if speculations and sent.slot == slot and one in sent.chunks and self.clock.now < sent.forget_at:
                    tiers.add(Tier.HBM)
            if not tiers:
                break
            run[min(tiers)] += 1
        return run


_WHO = st.integers(0, 7)
_PATH = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_DEPTH)
_SOME = st.lists(st.integers(0, MAX_DEPTH - 1), min_size=1, max_size=3)
_TIER = st.sampled_from(Tier)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), _WHO, _PATH, _TIER),
        st.tuples(st.just("store"), _WHO, _PATH, _TIER),
        st.tuples(st.just("store_some"), _WHO, _PATH, _SOME, _TIER),
        st.tuples(st.just("remove"), _WHO, _PATH, _SOME, st.none() | _TIER),
        st.tuples(st.just("clear"), _WHO),
        st.tuples(st.just("release"), _WHO),
        st.tuples(st.just("acquire"), _WHO),
        st.tuples(st.just("acquire"), _WHO),
        st.tuples(st.just("speculate"), _WHO, _PATH),
        st.tuples(st.just("speculate"), _WHO, _PATH),
        st.tuples(st.just("settle"), _WHO),
        st.tuples(st.just("cancel"), _WHO),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, TTL_S])),
        st.tuples(st.just("look"), _PATH),
    ),
    max_size=40,
)
