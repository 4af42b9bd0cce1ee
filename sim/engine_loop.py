"""Runs the model of a worker against the clock of an asyncio loop.

One timer waits for the end of the present step; nothing runs between steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sim.cache import CacheEvent
from sim.clock import WorkerClock
from sim.faults import Faults
from sim.generation import Generation
from sim.metrics import WorkerMetrics
from sim.worker import Request, Step, Worker

# Timers fire late; a step begins where the last one should have ended, so that they do not slow the worker down.
# Beyond this the machine is too busy, and catching up would bend the times of requests that arrive meanwhile.
_MAX_LAG_S: Final = 0.02


class EngineLoop:
    """Feeds requests to a worker and hands out what its steps produce.

    Args:
        worker: the model.
        clock: the worker's clock.
        metrics: told about tokens and ends of requests.
        faults: how slow it is.
        publish: called with the cache events of each step.
    """

    def __init__(
        self,
        worker: Worker,
        clock: WorkerClock,
        metrics: WorkerMetrics,
        faults: Faults,
        publish: Callable[[list[CacheEvent]], None],
    ) -> None:
        self.worker = worker
        self._clock = clock
        self._metrics = metrics
        self._faults = faults
        self._publish = publish
        self._generations: dict[Request, Generation] = {}
        self._step: Step | None = None
        self._step_ends_at = 0.0
        self._timer: asyncio.Handle | None = None
        self._paused = False

    def __len__(self) -> int:
        """Return the number of sequences in the engine."""
        return len(self._generations)

    def submit(self, generation: Generation) -> None:
        """Queue a sequence."""
        generation.arrived_at = self._clock.now()
        self.worker.add(generation.request)
        self._generations[generation.request] = generation
        if self._step is None:
            self._wake()

    def abort(self, generation: Generation) -> None:
        """Drop a sequence whose client has gone; its blocks are free at once. A finished one is left alone."""
        if self._generations.pop(generation.request, None) is None:
            return
        self.worker.abort(generation.request)
        generation.aborted = True
        generation.wakeup.set()
        self._metrics.ended(generation, "abort", self._clock.now())
        if self._step is None:
            self._wake()

    def pause(self) -> None:
        """Stand still until ``resume``."""
        self._paused = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Go on."""
        if self._paused:
            self._paused = False
            self._wake()

    def close(self) -> None:
        """Stop for good and abort everything."""
        self.pause()
        for generation in list(self._generations.values()):
            self.abort(generation)

    def _wake(self) -> None:
        """Advance in the loop's next turn, so that requests which arrive together share a step."""
        if self._paused:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """End the steps that are over and begin the next; then wait for its end."""
        self._timer = None
        now = begin = self._clock.now()
        while True:
            if self._step is not None:
                if self._step_ends_at > now:
                    self._wait_until(self._step_ends_at)
                    return
                begin = max(self._step_ends_at, now - _MAX_LAG_S * self._clock.speed)
                self._metrics.fell_behind(begin - self._step_ends_at)
                self._deliver(self._step)
            self._step = self.worker.start(begin)
            if self._step is None:
                wake_at = self.worker.wake_at()
                if wake_at is not None:
                    self._wait_until(wake_at)
                return
            slow = self._faults.active("slow")
            self._step_ends_at = begin + self._step.duration * (slow.factor if slow else 1)

    def _wait_until(self, moment: float) -> None:
        self._timer = self._clock.call_at(moment, self._advance)

    def _deliver(self, step: Step) -> None:
        result = self.worker.finish(step)
        self._publish(result.events)
        at = self._step_ends_at
        for request in result.emitted:
            generation = self._generations[request]
            self._metrics.emitted(generation, at)
            generation.emitted_at = at
            generation.wakeup.set()
        for request in result.finished:
            generation = self._generations.pop(request)
            self._metrics.ended(generation, generation.finish_reason, at)
