"""A sequence that a worker generates, as seen from outside its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sim.worker import Request


class Generation:
    """One sequence in the engine, as the handler of its HTTP request sees it.

    Attributes:
        request: its place in the worker; ``request.generated`` says how much of the output exists.
        pieces: text of each output token, those to come included.
        ids: output ids, those to come included.
        wakeup: set whenever there is more output, and when it was aborted; shared by the sequences of one HTTP request.
        finish_reason: ``length`` or ``stop``, reported with the last token.
        aborted: nobody waits for it any more.
        arrived_at: seconds on the worker's clock.
        emitted_at: when its newest token came, on the worker's clock.
    """

    __slots__ = ("aborted", "arrived_at", "emitted_at", "finish_reason", "ids", "pieces", "request", "wakeup")

    def __init__(
        self, request: Request, ids: Sequence[int], pieces: Sequence[str], finish_reason: str, wakeup: asyncio.Event
    ) -> None:
        self.request = request
        self.ids = ids
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.wakeup = wakeup
        self.aborted = False
        self.arrived_at = 0.0
        self.emitted_at = 0.0

    @property
    def done(self) -> bool:
        """Whether its last token exists."""
        return self.request.generated == self.request.output_tokens
