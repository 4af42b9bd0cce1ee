"""How fast each worker really prefills, learned from what the ledger sees.

Every worker starts from its configured ``T(n, p) = a + b·n + c·n·(p + n/2)``. The shape is kept, since it is given by
the model; one scale per worker corrects it, since clocks, quantization, tensor parallelism and company change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from gateway.config import PrefillConfig
from gateway.fleet.registry import Registry, Worker
from policies.base import COLUMNS

_A: Final = COLUMNS.index("prefill_a_s")
_B: Final = COLUMNS.index("prefill_b_s")
_C: Final = COLUMNS.index("prefill_c_s")

# One prefill says little: in a batch the first seems slow and the others instant. Their sums over this much predicted
# time, or this many prefills, do say something.
_FOLD_S: Final = 0.5
_FOLD_COUNT: Final = 16
_MAX_STEP: Final = math.log(2.0)  # one fold moves the scale by no more than this, however odd it is
_LEAST_GAIN: Final = 0.1  # a worker's first folds count fully, later ones this much
_MAX_LOG_SCALE: Final = math.log(64.0)


@dataclass(slots=True)
class _Learned:
    """What is known of one worker; ``log_scale`` is the logarithm, so that twice and half are equally far from 1."""

    log_scale: float = 0.0
    folds: int = 0
    count: int = 0
    predicted_s: float = 0.0
    observed_s: float = 0.0


class PrefillRates:
    """Corrects the ``prefill_*`` columns of the ``FleetView``; ``observe`` is the ledger's ``on_prefill``.

    Workers that serve the same models and are configured alike are taken to be alike until each has been seen: were
    only the first worker known to be faster than configured, it would get all the traffic and stay the only one known.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._learned: dict[Worker, _Learned] = {}
        self._unseen: set[Worker] = set(registry.workers.values())
        registry.on_change(self._on_change)

    def scale(self, worker: Worker) -> float:
        """Return by how much a worker's prefills take longer than configured; 1 while nothing is known."""
        learned = self._learned.get(worker)
        return math.exp(learned.log_scale) if learned is not None else 1.0

    def observe(self, worker: Worker, new_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Take one prefill into account; cheap, it is on the request path.

        Args:
            worker: where it ran.
            new_tokens: tokens it computed.
            cached_tokens: tokens before them that it found in the cache.
            seconds: from the start of its prefill to its first output byte.
        """
        if worker.row < 0:
            return
        learned = self._learned.get(worker)
        if learned is None:
            learned = self._learned[worker] = _Learned()
        prefill = worker.config.prefill
        context = cached_tokens + new_tokens / 2
        learned.count += 1
        learned.predicted_s += prefill.a_s + new_tokens * (prefill.b_s + prefill.c_s * context)
        learned.observed_s += seconds
        if learned.predicted_s * math.exp(learned.log_scale) >= _FOLD_S or learned.count >= _FOLD_COUNT:
            self._fold(worker, learned)

    def _fold(self, worker: Worker, learned: _Learned) -> None:
        if learned.predicted_s > 0 and learned.observed_s > 0:
            error = math.log(learned.observed_s / learned.predicted_s) - learned.log_scale
            if abs(error) < _MAX_STEP:  # far off, the gain does not shrink yet: a wrong start value is left quickly
                learned.folds += 1
            gain = max(_LEAST_GAIN, 1 / max(1, learned.folds))
            step = gain * min(_MAX_STEP, max(-_MAX_STEP, error))
            learned.log_scale = min(_MAX_LOG_SCALE, max(-_MAX_LOG_SCALE, learned.log_scale + step))
            self._unseen.discard(worker)
            self._write(worker, learned)
            if self._unseen:
                self._presume(worker)
        learned.count, learned.predicted_s, learned.observed_s = 0, 0.0, 0.0

    def _presume(self, seen: Worker) -> None:
        """Give the unseen workers that are like ``seen`` the mean scale of those that were seen."""
        kind = _kind(seen)
        known = [
            learned.log_scale
            for worker, learned in self._learned.items()
            if worker not in self._unseen and _kind(worker) == kind
        ]
        mean = fmean(known)
        for worker in self._unseen:
            if _kind(worker) == kind:
                learned = self._learned.setdefault(worker, _Learned())
                learned.log_scale, learned.folds = mean, 1
                self._write(worker, learned)

    def _write(self, worker: Worker, learned: _Learned) -> None:
        prefill, state, scale = worker.config.prefill, self._registry.fleet.state, math.exp(learned.log_scale)
        state[_A, worker.row] = prefill.a_s * scale
        state[_B, worker.row] = prefill.b_s * scale
        state[_C, worker.row] = prefill.c_s * scale

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if joined:
            self._unseen.add(worker)
            return
        self._unseen.discard(worker)
        self._learned.pop(worker, None)


def _kind(worker: Worker) -> tuple[PrefillConfig, set[str]]:
    return worker.config.prefill, set(worker.models.values())
