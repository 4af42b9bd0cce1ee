"""Whether predictions come true: what was expected in a worker's cache against what its engine reports.

Both fail in their own way. *Stale* tokens were expected and not found: removals were lost, or the events are another
worker's. *Missing* ones were found and not expected: stores were lost, or prompts are not tokenized as the engine does.
Where either grows beyond a bound, the worker's residency is built anew; where that does not help, it is tried less and
less often, and the log says what to look at.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gateway.config import Config
from gateway.events.feeds import EventFeeds
from gateway.fleet.registry import Registry, Worker
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.observe")

MIN_REQUESTS: Final = 20
"""Requests with a report that make a judgement."""

FIRST_PAUSE_S: Final = 60.0
_MAX_PAUSE_S: Final = 3600.0
_LOOK_S: Final = 5.0


class Accuracy(NamedTuple):
    """How predictions compared with reports, summed over the requests of a worker that had a report.

    Attributes:
        requests: how many.
        cached: tokens that the engine found in its cache.
        stale: tokens by which predictions exceeded that.
        missing: tokens by which they fell short.
    """

    requests: int = 0
    cached: int = 0
    stale: int = 0
    missing: int = 0

    def since(self, before: Accuracy) -> Accuracy:
        """Return what has been added to ``before``."""
        return Accuracy(*(now - then for now, then in zip(self, before, strict=True)))

    def drift(self, chunk_tokens: int) -> float:
        """Return ``sum |predicted - cached| / sum max(predicted, cached)``, 0 to 1.

        Predictions are whole chunks, and the last token of a prompt is always computed: differences below a chunk per
        request say nothing and are left out.
        """
        either = self.cached + self.stale
        slack = self.requests * chunk_tokens
        wrong = max(0, self.stale - slack) + max(0, self.missing - slack)
        return wrong / either if either else 0.0


@dataclass(slots=True)
class _Judged:
    """One worker: its accuracy at the last judgement, the drift found then, and when it may be resynced next."""

    seen: Accuracy
    drift: float = 0.0
    resync_at: float = float("-inf")
    pause_s: float = FIRST_PAUSE_S


class DriftWatch:
    """Judges every worker's drift, and has its residency built anew beyond a bound.

    Args:
        config: the bound, and tokens per chunk.
        registry: the workers.
        feeds: build residency anew.
        accuracy: returns the accuracy of every worker, summed since the start.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        feeds: EventFeeds,
        accuracy: Callable[[], Mapping[str, Accuracy]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bound = config.index.resync_drift
        self._chunk_tokens = config.prompt.chunk_tokens
        self._registry = registry
        self._feeds = feeds
        self._accuracy = accuracy
        self._clock = clock
        self._judged: dict[Worker, _Judged] = {}
        self._task: asyncio.Task[Any] | None = None
        registry.on_change(self._on_change)

    @property
    def drifts(self) -> dict[str, float]:
        """The drift of each worker at its last judgement."""
        return {worker.name: judged.drift for worker, judged in self._judged.items()}

    async def start(self) -> None:
        """Begin to judge."""
        self._task = spawn(self._keep_looking(), "watch the drift of predictions")

    async def close(self) -> None:
        """Stop."""
        await stop(self._task)

    def look(self) -> None:
        """Judge the workers of which enough is known since their last judgement."""
        accuracy = self._accuracy()
        for name, worker in self._registry.workers.items():
            total = accuracy.get(name, Accuracy())
            judged = self._judged.get(worker)
            if judged is None or total.requests < judged.seen.requests:
                self._judged[worker] = _Judged(total)
            elif total.requests - judged.seen.requests >= MIN_REQUESTS:
                judged.drift = total.since(judged.seen).drift(self._chunk_tokens)
                judged.seen = total
                self._act(worker, judged)

    def _act(self, worker: Worker, judged: _Judged) -> None:
        now = self._clock()
        if not self._bound or judged.drift <= self._bound:
            if now >= judged.resync_at:
                judged.pause_s = FIRST_PAUSE_S
            return
        if now < judged.resync_at or not self._feeds.resync(worker):
            return
        judged.resync_at = now + judged.pause_s
        judged.pause_s = min(2 * judged.pause_s, _MAX_PAUSE_S)
        log.warning(
            "predicted and reported cached tokens differ by %.0f%%; the worker's residency is built anew. "
            "If this comes again, `kvway check` finds the cause",
            100 * judged.drift,
            extra={"worker": worker.name},
        )

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._judged.pop(worker, None)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()
