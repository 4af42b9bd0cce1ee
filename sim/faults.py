"""Faults on demand: what a worker may be told to do wrong, so that others can be seen to cope."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec

Kind = Literal["die", "hang", "error503", "cut", "slow", "lose_transfer", "expire_lease", "slow_link", "none"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault, as ``POST /sim/fault`` takes it.

    Attributes:
        kind: ``die`` (all sockets close, as after a kill), ``hang`` (connections are accepted, nothing is answered,
            streams stand still), ``error503`` (inference requests are refused as at a queue limit), ``cut`` (streams
            break off without an end), ``slow`` (steps take longer), ``lose_transfer`` (KV handed over does not arrive),
            ``expire_lease`` (KV that is handed over is given up at once), ``slow_link`` (it takes longer to arrive) or
            ``none`` (end all faults).
        seconds: how long it lasts; 0: until ``none``.
        count: how many requests it meets (``error503``, ``cut``, ``lose_transfer``, ``expire_lease``); 0: all of them.
        after_tokens: ``cut``: tokens that a stream still delivers.
        factor: ``slow``, ``slow_link``: how many times longer steps, or transfers, take.
    """

    kind: Kind
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    after_tokens: Annotated[int, msgspec.Meta(ge=0)] = 3
    factor: Annotated[float, msgspec.Meta(gt=0)] = 10.0


class Faults:
    """The faults that hold now."""

    def __init__(self) -> None:
        self._active: dict[Kind, tuple[Fault, float]] = {}
        self._met: dict[Kind, int] = {}

    def set(self, fault: Fault) -> None:
        """Begin a fault, in place of an earlier one of its kind; ``none`` ends all."""
        if fault.kind == "none":
            self._active.clear()
            return
        self._active[fault.kind] = (fault, time.monotonic() + fault.seconds if fault.seconds else float("inf"))
        self._met[fault.kind] = 0

    def active(self, kind: Kind) -> Fault | None:
        """Return the fault of a kind if it holds."""
        fault, until = self._active.get(kind, (None, 0.0))
        if fault is None or time.monotonic() >= until or (fault.count and self._met[kind] >= fault.count):
            return None
        return fault

    def meet(self, kind: Kind) -> Fault | None:
        """Return the fault of a kind if it holds, and count this request as one of those it meets."""
        fault = self.active(kind)
        if fault is not None:
            self._met[kind] += 1
        return fault
