"""Prefill and decode apart: which requests go through both, and what the way between them takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.base import Floats
from policies.disaggregation import Comparison, Fetch, Weights, choose_pair, compare, decoding_cost_s
from sim.batch import BatchWorker
from sim.fleet import DisaggregationSettings, FleetSettings
from sim.pull import held_and_given
from sim.requests import SimRequest
from sim.router import Router
from sim.tiers import Channel


class Turn(NamedTuple):
    """A conversation's prompt that lies with the worker that decoded its last turn.

    Attributes:
        end: its last whole chunk.
        worker: which.
        tokens: whole chunks of it.
        until: when it is given up.
    """

    end: int
    worker: int
    tokens: int
    until: float


class Prefill(NamedTuple):
    """Where a prompt is computed, and what of it is pulled there first."""

    worker: int
    turn: Turn | None


class Disaggregation:
    """The two pools, and the link between them.

    A prompt's KV follows the prefill layer by layer: what the link has moved while the prompt was being computed need
    not be waited for. Several transfers share the link one after the other. What the next turn's prefill
    pulls shares the way back alike.

    Args:
        settings: of the pools.
        fleet: of the fleet.
        block_tokens: tokens per block.
    """

    def __init__(self, settings: DisaggregationSettings, fleet: FleetSettings, block_tokens: int) -> None:
        self.link = Channel(settings.bytes_per_s, settings.latency_s)
        self.back = Channel(settings.bytes_per_s, settings.latency_s)
        self.transfers = self.turns_pulled = 0
        self._turns: dict[int, Turn] = {}  # by their end, the oldest first
        self._settings = settings
        self._layers = fleet.layers
        self._kv_bytes = fleet.speed.kv_bytes_per_token
        self._block_tokens = block_tokens
        self._weights = Weights(
            interference=settings.interference, itl_weight=settings.itl_weight, read_s=fleet.speed.decode_d2_s
        )

    def pools(self, up: list[int]) -> tuple[list[int], list[int]]:
        """Return the prefill and the decode workers among those that are up."""
        first = self._settings.prefill_workers
        return [worker for worker in up if worker < first], [worker for worker in up if worker >= first]

    def prefill_worker(
        self, request: SimRequest, router: Router, prefill: list[int], decode: list[int], now: float
    ) -> Prefill | None:
        """Return where a request's prompt is computed; None: where it is decoded.

        It is worth two legs where both pools are there, there is enough to compute, and it pays.
        """
        settings = self._settings
        if not prefill or not decode or self.link.down_until > now or settings.policy == "never":
            return None
        if settings.least_tokens:
            held = max(router.residency(request, decode, now).hits())
            if request.prompt_tokens - held < settings.least_tokens:
                return None
        turn = self._turn_before(request, decode, now)
        comparison = self._compare(request, router, prefill, decode, now, turn)
        if settings.policy == "break-even" and not comparison.pays:
            return None
        pair = choose_pair(comparison, router.asked(request), router.view(prefill), comparison.apart_s)
        if pair is None:
            return None
        if turn is not None:  # engines give it away once
            del self._turns[turn.end]
        return Prefill(prefill[pair[0]], turn)

    def decode_worker(self, request: SimRequest, router: Router, decode: list[int], now: float) -> int:
        """Return where a request is decoded whose prompt has been computed."""
        here = router.prospects(request, decode, now, self._weights)
        return decode[int(decoding_cost_s(here, self._transfer_s(request, here.held_tokens, now)).argmin())]

    def arrives_at(self, tokens: int, prefill_s: float, now: float) -> float:
        """Move the KV of a prompt that has just been computed; return when the decode worker has all of it.

        Args:
            tokens: tokens that the decode worker does not hold yet.
            prefill_s: how long computing the prompt took.
            now: simulated time.
        """
        self.transfers += 1
        size = float(tokens * self._kv_bytes)
        idle_s = max(0.0, min(prefill_s, now - self.link.free_at))
        ahead = min(size * (self._layers - 1) / self._layers, idle_s * self._settings.bytes_per_s)
        self.link.moved_bytes += ahead
        return self.link.transfer(size - ahead, now)

    def keep(self, request: SimRequest, worker: int, now: float) -> None:
        """A turn that was handed over is answered: its prompt lies with the worker that decoded it."""
        chunks = min(request.prompt_tokens // self._block_tokens, len(request.chunks))
        if self._settings.pull_back_s and chunks:
            while self._turns and (oldest := next(iter(self._turns.values()))).until <= now:
                del self._turns[oldest.end]
            end, until = request.chunks[chunks - 1], now + self._settings.pull_back_s
            self._turns.pop(end, None)
            self._turns[end] = Turn(end, worker, chunks * self._block_tokens, until)

    def pull(
        self, workers: Sequence[BatchWorker], source: int, target: int, hashes: Sequence[int], now: float
    ) -> tuple[Sequence[int], float]:
        """Begin to pull what a decode worker still has of a kept turn, and a prefill worker has not.

        Returns:
            The prompt's leading blocks that the target will hold, and when; at once where there is nothing to pull.
        """
        held, given = held_and_given(workers, source, target, hashes)
        if given <= held:
            return hashes[:held], now
        self.turns_pulled += 1
        return hashes[:given], self.back.transfer(float((given - held) * self._block_tokens * self._kv_bytes), now)

    def counters(self) -> dict[str, float]:
        """Return what has been moved."""
        return {
            "transfers": float(self.transfers),
            "transfer_bytes": self.link.moved_bytes,
            "turns_pulled": float(self.turns_pulled),
        }

    def _turn_before(self, request: SimRequest, decode: list[int], now: float) -> Turn | None:
        """Return the kept turn that a request goes on from."""
        if not self._turns:
            return None
        chunks = request.chunks[: request.prompt_tokens // self._block_tokens]
        turn = next((self._turns[chunk] for chunk in reversed(chunks) if chunk in self._turns), None)
        return turn if turn is not None and turn.until > now and turn.worker in decode else None

    def _compare(
        self, request: SimRequest, router: Router, prefill: list[int], decode: list[int], now: float, turn: Turn | None
    ) -> Comparison:
        token_s = self._kv_bytes / self._settings.bytes_per_s
        fetch = Fetch(turn.tokens, np.full(len(prefill), token_s)) if turn is not None else None
        there = router.prospects(request, prefill, now, self._weights, fetch)
        here = router.prospects(request, decode, now, self._weights)
        transfer_s = np.broadcast_to(self._transfer_s(request, here.held_tokens, now), (len(prefill), len(decode)))
        return compare(there, here, transfer_s, self._weights.interference)

    def _transfer_s(self, request: SimRequest, held_tokens: Floats, now: float) -> Floats:
        """Return what moving the rest of a prompt to workers that hold some of it would take, ``[m]``."""
        settings = self._settings
        before_s = max(0.0, self.link.free_at - now) + settings.latency_s
        return before_s + (request.prompt_tokens - held_tokens) * (self._kv_bytes / settings.bytes_per_s)
