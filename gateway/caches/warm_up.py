"""A prompt computed by a named worker because an operator says so: a request of our own for one token."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import Any, Final

from gateway.errors import NotPossible, NoWorker, Saturated, UpstreamError
from gateway.fleet.registry import State, Worker
from gateway.observe.observer import Observer
from gateway.relay.plan import Plan
from gateway.relay.prefill import PrefillLeg
from gateway.relay.route import count_on
from gateway.relay.services import Services
from gateway.replication.seen import SeenPrompt
from gateway.replication.warmup import WarmUp, make_warm_up
from policies.base import RoutingRequest
from policies.chunks import ChunkHasher
from policies.replication import Allowance

_MINUTE_S: Final = 60.0


class WarmUps:
    """Sends warm-ups through the relay's own upstream client: they are counted as load and wait for their turn.

    Args:
        services: the other rooms.
        hasher: the same as for prompts.
        tokens_per_min: uncached tokens that may be computed.
    """

    def __init__(self, services: Services, hasher: ChunkHasher, tokens_per_min: int) -> None:
        self._services = services
        self._hasher = hasher
        self._tokens_per_s = tokens_per_min / _MINUTE_S
        self._allowance = Allowance(_MINUTE_S, since=monotonic() - _MINUTE_S)
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        services.registry.on_change(self._on_change)

    def expose(self, observer: Observer) -> None:
        """Export what was sent."""
        about = "Prompts computed on a worker by `kvway cache prefetch`: completed, failed, or refused by the budget."
        observer.counter("kvway_cache_warmups_total", about, lambda: self._outcomes, ("worker", "outcome"))
        about = "Uncached tokens of them."
        observer.counter("kvway_cache_warmup_tokens_total", about, lambda: self._tokens, ("worker",))

    async def send(self, worker: Worker, seen: SeenPrompt, root: bytes, hit_tokens: int) -> dict[str, Any]:
        """Have a worker compute the whole chunks of a prompt.

        Args:
            worker: which serves the prompt's model.
            seen: the prompt.
            root: what its chain begins with.
            hit_tokens: leading tokens that the worker is believed to hold.

        Returns:
            ``tokens`` of the prompt that was sent, and ``cached_tokens`` that the engine says it had, or None.

        Raises:
            NotPossible: no request of our own would make the engine hold this prompt.
            NoWorker: the worker takes no requests now.
            Saturated: the budget is spent.
            UpstreamError: the worker did not serve it.
        """
        warm_up = self._prepare(worker, seen, root)
        new_tokens = max(0, warm_up.tokens - hit_tokens)
        self._allowance.earn(self._tokens_per_s, monotonic())
        if not self._allowance.spend(new_tokens):
            wait_s = self._allowance.wait_s(self._tokens_per_s)
            self._outcomes[worker.name, "refused"] += 1
            message = f"cache_control.warm_up_tokens_per_min is spent; ask again in {wait_s:.0f} s."
            raise Saturated(message, retry_after_s=wait_s)
        leg = self._begin(worker, seen, warm_up, min(hit_tokens, warm_up.tokens))
        await leg.done()
        if leg.answer is None:
            self._outcomes[worker.name, "failed"] += 1
            detail = "was given up" if leg.failure is None else leg.failure.detail
            raise UpstreamError(f"{worker.name} did not compute the prompt: it {detail}.")
        self._outcomes[worker.name, "completed"] += 1
        self._tokens[worker.name] += new_tokens
        return {"tokens": warm_up.tokens, "cached_tokens": leg.answer.cached_tokens}

    def _prepare(self, worker: Worker, seen: SeenPrompt, root: bytes) -> WarmUp:
        if worker.state is not State.READY:
            raise NoWorker(f"{worker.name} is {worker.state} and takes no requests.", retry_after_s=1)
        if not self._tokens_per_s:
            raise NotPossible("cache_control.warm_up_tokens_per_min is 0: nothing is computed to be cached.")
        if not worker.config.answers_alone:
            raise NotPossible(f"{worker.name} answers no request without a partner of the other role.")
        chunks = seen.prompt.chunks
        warm_up = make_warm_up(seen, len(chunks), self._hasher, root) if chunks else None
        if warm_up is None:
            raise NotPossible(
                "No request of kvway's own would leave this prompt in an engine's cache: it is shorter than a chunk, "
                "or only the engine knows its tokens. Send the request itself."
            )
        return warm_up

    def _begin(self, worker: Worker, seen: SeenPrompt, warm_up: WarmUp, hit_tokens: int) -> PrefillLeg:
        chunk_tokens = self._hasher.chunk_tokens
        request = RoutingRequest(seen.model, warm_up.tokens, seen.prompt.chunks, chunk_tokens, output_tokens=1)
        plan = Plan(seen.model, True, request)
        route = count_on(self._services, plan, worker, hit_tokens, "prefetch", monotonic())
        return PrefillLeg(self._services, warm_up.head_for(worker), plan, route, warm_up.body, is_retried=False)

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self._tokens.pop(worker.name, None)
            for counted in [counted for counted in self._outcomes if counted[0] == worker.name]:
                del self._outcomes[counted]
