"""Whether prefill and decode should go to two workers, and to which; seconds, tokens and bytes throughout.

A request that stays whole waits for the prefills before it and delays every request that decodes on its worker. One
whose prefill is done elsewhere pays for moving its KV cache. Neither is right always: a prompt that is mostly cached
where it is decoded is best left there, a long new one in front of a busy decode worker is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Final

import numpy as np

from policies.base import FleetView, Floats, Residency
from policies.cost import prefill_seconds

_FAR: Final = 1.25
"""A decode worker in another domain than the prefill worker is taken where the near ones carry this much more."""
_GAIN: Final = 0.2
"""Weight of the newest transfer in a link's learned bandwidth."""
_MAX_LINKS: Final = 4096


@dataclass(slots=True, frozen=True)
class Prospect:
    """What a prompt would meet on the worker where its first token would come soonest.

    Attributes:
        row: that worker.
        wait_s: prefills before it.
        prefill_s: its own.
        running: requests there.
    """

    row: int
    wait_s: float
    prefill_s: float
    running: float


def prospect(fleet: FleetView, residency: Residency, prompt_tokens: int, now: float) -> Prospect:
    """Return the best prospect among a fleet's ``n`` workers, at least one.

    Args:
        fleet: the workers.
        residency: what each of them holds of the prompt.
        prompt_tokens: its length.
        now: on the clock of the fleet's times; the prefill under way has been computed in part.
    """
    hit = np.minimum(residency.hit_tokens, prompt_tokens - 1)
    prefill_s = prefill_seconds(
        (prompt_tokens - hit).astype(float), hit.astype(float), fleet.prefill_a_s, fleet.prefill_b_s, fleet.prefill_c_s
    )
    since = fleet.prefilling_since
    elapsed_s = np.where(since > 0, now - since, 0.0)
    wait_s: Floats = np.maximum(fleet.pending_prefill_s - elapsed_s, 0.0)
    row = int(np.argmin(wait_s + prefill_s))
    return Prospect(row, float(wait_s[row]), float(prefill_s[row]), float(fleet.running[row]))


def whole_cost_s(here: Prospect, interference: float) -> float:
    """Return what a request costs that stays whole: ``wait + prefill·(1 + interference·running)``.

    Args:
        here: its prospect among the workers that decode.
        interference: how much a second of prefill costs every request that runs beside it, in seconds of TTFT.
    """
    return here.wait_s + here.prefill_s * (1 + interference * here.running)


def apart_cost_s(there: Prospect, transfer_s: float) -> float:
    """Return what it costs over two workers: ``wait + prefill + transfer``.

    Args:
        there: its prospect among the prefill workers.
        transfer_s: for its KV to get to the decode worker.
    """
    return there.wait_s + there.prefill_s + transfer_s


def least_loaded(fleet: FleetView, near: Floats, prompt_tokens: int) -> int:
    """Return the row of the worker to decode a request: the one with the least context to read per step.

    That is relative to the size of its KV cache, where all sizes are known.

    Args:
        fleet: the decode workers, ``n`` of them, at least one.
        near: ``[n]``, 1 for workers in the domain of the prefill worker, 0 for others.
        prompt_tokens: of the request.
    """
    capacity = fleet.kv_capacity_tokens
    context = fleet.decode_tokens + fleet.pending_prefill_tokens + prompt_tokens
    load = context / capacity if capacity.all() else context
    return int(np.argmin(load * np.where(near > 0, 1.0, _FAR)))


class LinkRates:
    """Bandwidth between pairs of workers, learned from what was moved; logarithms are averaged.

    Args:
        bytes_per_s: to start from.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._start = log(bytes_per_s)
        self._links: dict[tuple[str, str], float] = {}

    def observe(self, source: str, target: str, size_bytes: float, seconds: float) -> None:
        """Learn from one transfer; one of nothing, or in no time, says nothing."""
        if size_bytes <= 0 or seconds <= 0:
            return
        link = (source, target)
        known = self._links.pop(link, self._start)
        if len(self._links) >= _MAX_LINKS:
            del self._links[next(iter(self._links))]  # the one that was not used for longest
        self._links[link] = known + _GAIN * (log(size_bytes / seconds) - known)

    def bytes_per_s(self, source: str, target: str) -> float:
        """Return a link's bandwidth."""
        return exp(self._links.get((source, target), self._start))
