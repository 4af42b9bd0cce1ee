"""The self-check: a sample of prompts is rendered by a worker, too, and the two must be the same tokens.

A wrong token is a miss for ever, and nothing else would show it. So when an engine ever makes other tokens of a request
than were made here, its model is rendered by the engine from then on.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import zip_longest
from time import monotonic
from typing import Any, Final

from gateway.config import SelfCheckConfig
from gateway.fleet.registry import Candidates
from gateway.prompt.engine import EngineError, EngineTokenizer
from gateway.prompt.tokenizer import unpack
from gateway.tasks import spawn
from policies.chunks import TOKEN_BYTES

log = logging.getLogger("kvway")

SAME: Final = "same"
DIFFERENT: Final = "different"
UNANSWERED: Final = "unanswered"

_MINUTE_S: Final = 60.0
_AROUND_MIDNIGHT: Final = timedelta(minutes=1)


class SelfCheck:
    """Samples prompts and holds them against the engine's.

    The first prompt of each model is always in the sample: a wrong template shows at once.

    Args:
        config: how many prompts are checked.
        engine: asks workers.
        on_different: called with a model of which a prompt was different, each time.

    Attributes:
        results: number of checks by model and result.
        differing: models of which a prompt was different; they are rendered by the engine.
    """

    def __init__(self, config: SelfCheckConfig, engine: EngineTokenizer, on_different: Callable[[str], None]) -> None:
        self.results: Counter[tuple[str, str]] = Counter()
        self.differing: set[str] = set()
        self._config = config
        self._engine = engine
        self._on_different = on_different
        self._until_next: dict[str, int] = {}
        self._minute_began = -_MINUTE_S
        self._this_minute = 0

    def proven(self, model: str) -> bool:
        """Return whether the engine has confirmed a prompt of ``model``, and never contradicted one."""
        return (model, SAME) in self.results and model not in self.differing

    def due(self, model: str) -> bool:
        """Return whether the prompt at hand is one to check. On the request path: one look-up for most prompts."""
        left = self._until_next.get(model, 1) - 1
        if left > 0:
            self._until_next[model] = left
            return False
        if not self._config.rate:
            return False
        now = monotonic()
        if now - self._minute_began >= _MINUTE_S:
            self._minute_began, self._this_minute = now, 0
        if self._this_minute >= self._config.max_per_minute:
            return False  # the next prompt is due then; a model's first one, too
        self._this_minute += 1
        mean = 1 / self._config.rate
        self._until_next[model] = max(1, round(random.uniform(mean / 2, mean * 3 / 2)))
        return True

    def begin(
        self, path: str, body: bytes, payload: Callable[[], dict[str, Any]], ids: bytes, candidates: Candidates
    ) -> None:
        """Check one prompt in the background.

        Args:
            path: of the request.
            body: of the request.
            payload: makes the ``/tokenize`` request, for workers that do not render.
            ids: what was made of it here, packed.
            candidates: model and workers.
        """
        spawn(self._check(path, body, payload, ids, candidates), "check a prompt against the engine's")

    async def _check(
        self, path: str, body: bytes, payload: Callable[[], dict[str, Any]], ids: bytes, candidates: Candidates
    ) -> None:
        model, worker = candidates.model, random.choice(candidates.workers)
        try:
            theirs = await self._engine.rendered(worker.config, path, body, payload)
        except EngineError as error:
            self.results[model, UNANSWERED] += 1
            log.info("a prompt of model %s could not be checked: %s", model, error)
            return
        if theirs == ids:
            self.results[model, SAME] += 1
            return
        if date_turns(datetime.now()):  # which many templates tell
            self.results[model, UNANSWERED] += 1
            log.info("a prompt of model %s could not be checked: the date turns, here and there not at once", model)
            return
        self.results[model, DIFFERENT] += 1
        self.differing.add(model)
        self._on_different(model)
        at, our_id, their_id = first_difference(ids, theirs)
        log.error(
            "model %s: token %d of a prompt is %s here and %s on worker %s (%d and %d tokens in all); from now on the "
            "engine renders this model's prompts. Are models.%s.tokenizer and chat_template those that it serves?",
            *(model, at, our_id, their_id, worker.name, len(ids) // TOKEN_BYTES, len(theirs) // TOKEN_BYTES, model),
        )


def date_turns(now: datetime) -> bool:
    """Return whether another clock may tell another date, or may have told it while a prompt was checked."""
    return (now - _AROUND_MIDNIGHT).date() != (now + _AROUND_MIDNIGHT).date()


def first_difference(ours: bytes, theirs: bytes) -> tuple[int, int | str, int | str]:
    """Return where two packed sequences first differ, and the token of each there, ``nothing`` behind an end."""
    pairs = zip_longest(unpack(ours), unpack(theirs), fillvalue="nothing")
    return next((at, our_id, their_id) for at, (our_id, their_id) in enumerate(pairs) if our_id != their_id)
