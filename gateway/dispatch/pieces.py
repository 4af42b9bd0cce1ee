"""Which prompts go to their worker in pieces, and what became of those; ``policies.pieces`` says why they do."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import Final

import msgspec

from gateway.config import Config
from gateway.fleet.registry import Candidates, Registry, State, Worker
from gateway.observe.observer import Observer
from gateway.prompt.prompt import Prompt
from gateway.prompt.request import InferenceRequest
from gateway.replication.seen import SeenPrompt
from gateway.replication.warmup import WarmUp, make_warm_up
from policies.base import COLUMNS
from policies.chunks import ChunkHasher
from policies.pieces import has_room, is_long, piece_ends

_DECODE_TOKENS: Final = COLUMNS.index("decode_tokens")
_CAPACITY: Final = COLUMNS.index("kv_capacity_tokens")
_PAUSE_S: Final = 300.0  # a worker that refuses pieces, or does not find what they left, gets none for so long
_TURNED_AWAY: Final = (401, 403)
_MISSES: Final = 3  # prompts in succession of which a worker has found nothing


class LongPrompt(msgspec.Struct):
    """A prompt that may go in pieces.

    Attributes:
        seen: what pieces are made of.
        root: what its chain of chunks begins with.
        answer_tokens: of the answer at most, as far as the request says.
    """

    seen: SeenPrompt
    root: bytes
    answer_tokens: int


class Pieces:
    """Says which prompts go in pieces where, and keeps count.

    Args:
        config: size of a piece, and how prompts are cut into chunks.
        registry: the workers.
    """

    def __init__(self, config: Config, registry: Registry) -> None:
        self._piece_tokens = config.dispatch.piece_tokens
        self._hasher = ChunkHasher(config.prompt.chunk_tokens, config.prompt.hash_seed)
        self._registry = registry
        self._paused_until: dict[Worker, float] = {}
        self._misses: Counter[Worker] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._tokens = 0
        registry.on_change(self._on_change)

    def expose(self, observer: Observer) -> None:
        """Export what was sent."""
        observer.counter(
            "kvway_dispatch_pieces_total",
            "Pieces of long prompts: completed, evicted (what it was to go on from was gone), failed, refused.",
            lambda: self._outcomes,
            ("outcome",),
        )
        observer.counter("kvway_dispatch_piece_tokens_total", "Tokens computed by pieces.", lambda: self._tokens)

    def read(self, model: str, request: InferenceRequest, prompt: Prompt, candidates: Candidates) -> LongPrompt | None:
        """Return what pieces of a prompt can be made of; None where it is short, or its token ids are not known.

        Args:
            model: as the client calls it.
            request: what was asked.
            prompt: its prompt; of several in one request, chunks and ids are those of the first.
            candidates: who serves the model.
        """
        if not prompt.exact or self._registry.apart or not is_long(prompt.tokens, self._piece_tokens):
            return None
        root = self._hasher.root(candidates.model, candidates.lora, request.cache_salt)
        seen = SeenPrompt(model, request.cache_salt, "", b"", prompt)
        return LongPrompt(seen, root, request.max_tokens or 1)

    def obstacle(self, worker: Worker, long: LongPrompt) -> str:
        """Return why a worker gets a long prompt whole, whatever it has cached; "" where it may get pieces."""
        if worker.state is not State.READY:
            return f"the worker is {worker.state}"
        if not worker.config.answers_alone:
            return "the worker answers nothing alone"
        if monotonic() < self._paused_until.get(worker, 0.0):
            return "the worker has refused pieces, or found nothing of them, and gets none for a while"
        # The engine will refuse the request itself; vLLM lets answers be shorter than they may be.
        answer_tokens = 1 if worker.is_vllm else long.answer_tokens
        if 0 < worker.context_tokens < long.seen.prompt.tokens + answer_tokens:
            return "it is longer than the worker's models take"
        return ""

    def ends(self, worker: Worker, long: LongPrompt, hit_tokens: int) -> list[int]:
        """Return how many leading tokens each piece of a prompt covers on a worker; nothing: it goes whole."""
        if self.obstacle(worker, long):
            return []
        prompt, chunk_tokens = long.seen.prompt, self._hasher.chunk_tokens
        ends = piece_ends(prompt.tokens, hit_tokens, self._piece_tokens, chunk_tokens)
        return [end for end in ends if end <= len(prompt.chunks) * chunk_tokens]

    def have_room(self, worker: Worker, prompt_tokens: int) -> bool:
        """Return whether a worker can be expected to keep what pieces leave in its cache."""
        state, elsewhere = self._registry.fleet.state, self._registry.elsewhere
        running = state.item(_DECODE_TOKENS, worker.row)
        if elsewhere is not None:
            running += elsewhere.item(_DECODE_TOKENS, worker.row)
        return has_room(prompt_tokens, running, state.item(_CAPACITY, worker.row))

    def request(self, long: LongPrompt, end: int) -> WarmUp | None:
        """Return the request that computes a prompt up to ``end``; None where its ids do not bring all of it."""
        return make_warm_up(long.seen, end // self._hasher.chunk_tokens, self._hasher, long.root)

    def completed(self, new_tokens: int, cached_tokens: int | None, begin: int) -> bool:
        """Count a piece; return whether it found what the one before it has left, as far as that can be told.

        Args:
            new_tokens: of the piece.
            cached_tokens: what its engine found in the cache, None where it does not say.
            begin: what it should have found.
        """
        found = cached_tokens is None or 2 * cached_tokens >= begin
        self._outcomes["completed" if found else "evicted"] += 1
        self._tokens += new_tokens
        return found

    def failed(self, worker: Worker, refused: bool, status: int) -> None:
        """Count a piece that was not computed.

        A worker that finds such requests wrong gets none for a while; one that turns away this client takes others'.

        Args:
            worker: where it went.
            refused: the worker found the request itself wrong.
            status: of its answer, 0 without one.
        """
        self._outcomes["refused" if refused else "failed"] += 1
        if refused and status not in _TURNED_AWAY:
            self._pause(worker)

    def found(self, worker: Worker, hit_tokens: int, cached_tokens: int) -> None:
        """Note what an engine found of a prompt when it came itself, after pieces of it.

        Where it never finds what they computed, they are of no use there: it may cache nothing, or the token ids are
        not those that it works with.

        Args:
            worker: where it went.
            hit_tokens: tokens that the first piece could expect in the cache.
            cached_tokens: tokens that the engine found in the end.
        """
        if cached_tokens > hit_tokens + self._hasher.chunk_tokens:
            self._misses.pop(worker, None)
        elif worker.row >= 0:
            self._misses[worker] += 1
            if self._misses[worker] >= _MISSES:
                self._pause(worker)

    def _pause(self, worker: Worker) -> None:
        if worker.row >= 0:
            self._misses.pop(worker, None)
            self._paused_until[worker] = monotonic() + _PAUSE_S

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._paused_until.pop(worker, None)
            self._misses.pop(worker, None)
