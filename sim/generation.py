"""A sequence that a worker generates, as seen from outside its engine, and where its text ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.worker import Request

if TYPE_CHECKING:
    from sim.logprobs import Logprobs


class Generation:
    """One sequence in the engine, as the handler of its HTTP request sees it.

    Attributes:
        request: its place in the worker; ``request.generated`` says how much of the output exists.
        pieces: text of each output token, those to come included.
        ids: output ids, those to come included.
        wakeup: set whenever there is more output, and when it was aborted; shared by the sequences of one HTTP request.
        finish_reason: ``length`` or ``stop``, reported with the last token.
        stop_reason: the stop string that ended it; None: none did.
        logprobs: log probabilities of its tokens; None: nobody asked.
        aborted: nobody waits for it any more.
        arrived_at: seconds on the worker's clock.
        emitted_at: when its newest token came, on the worker's clock.
    """

    __slots__ = (
        *("aborted", "arrived_at", "emitted_at", "finish_reason", "ids", "logprobs", "pieces", "request"),
        *("stop_reason", "wakeup"),
    )

    def __init__(
        self,
        request: Request,
        ids: Sequence[int],
        pieces: Sequence[str],
        finish_reason: str,
        wakeup: asyncio.Event,
        stop_reason: str | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        self.request = request
        self.ids = ids
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.wakeup = wakeup
        self.stop_reason = stop_reason
        self.logprobs = logprobs
        self.aborted = False
        self.arrived_at = 0.0
        self.emitted_at = 0.0

    @property
    def done(self) -> bool:
        """Whether its last token exists."""
        return self.request.generated == self.request.output_tokens


@dataclass(slots=True, frozen=True)
class Stop:
    """Where a stop string ends an answer.

    Attributes:
        text: the stop string.
        tokens: how many tokens are generated, those of the stop string included.
        pieces: text of each of them, as far as it is before the answer's end.
    """

    text: str
    tokens: int
    pieces: list[str]


def find_stop(pieces: Sequence[str], stops: Sequence[str], included: bool, least: int) -> Stop | None:
    """Return where the first of the stop strings ends an answer; None: it has none of them.

    As in vLLM, the text ends before the stop string, or behind it where that is to be ``included``, and of several that
    one token completes the first in the request's order counts; the first ``least`` tokens complete none.
    """
    text = ""
    for tokens, piece in enumerate(pieces, 1):
        text += piece
        for stop in stops if tokens > least else ():
            at = text.find(stop, max(0, len(text) - len(piece) - len(stop) + 1))
            if at >= 0:
                return Stop(stop, tokens, _within(pieces[:tokens], at + len(stop) if included else at))
    return None


def _within(pieces: Sequence[str], length: int) -> list[str]:
    """Return the pieces without what is beyond so many characters."""
    kept = []
    for piece in pieces:
        kept.append(piece[:length])
        length -= len(kept[-1])
    return kept
