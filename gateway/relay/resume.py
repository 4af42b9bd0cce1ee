"""Stream resumption: a stream whose worker dies goes on, on another worker, and the client sees one stream.

``Resumption`` takes the exchange's place as the receiver of a worker's stream, of requests for which it is switched on
and of no others. It passes whole events only, in chunks of its own, so that a stream is never cut inside an event.
"""

from __future__ import annotations

from time import monotonic
from typing import Final, Protocol

import msgspec

from gateway.config import ResumptionConfig
from gateway.fleet.registry import Worker
from gateway.relay.chunked import LAST_CHUNK, chunk
from gateway.relay.head import Framing, ResponseHead
from gateway.relay.partial import RESUMABLE_PATHS, Joint, PartialAnswer, Refusal, continued_body, refusal_of
from gateway.relay.plan import Plan, make_plan
from gateway.relay.retry import Failure, FailureKind, refused_by
from gateway.relay.route import has_others
from gateway.relay.services import Services
from gateway.relay.sse import end_of_events, split_events
from gateway.relay.upstream import Receiver

_MAX_EVENT_BYTES: Final = 256 * 1024


class Exchange(Receiver, Protocol):
    """The exchange, as its resumption sees it."""

    def abandon(self, failure: Failure) -> None:
        """Give up the attempt under way."""
        ...


def resumption(services: Services, exchange: Exchange, plan: Plan, path: str, body: bytes) -> Resumption | None:
    """Return what resumes a request's stream, None where that is switched off or its API does not allow it."""
    config = services.resumption_for(plan.model or "")
    if not config.max_per_stream or path not in RESUMABLE_PATHS:
        return None
    return Resumption(services, config, exchange, plan, path, body)


class Resumption:
    """One request's stream, over as many workers as it takes.

    Args:
        services: the other rooms.
        config: how often, and of how much text.
        exchange: what the stream is passed on to.
        plan: the request's plan.
        path: its path.
        body: its body.
    """

    __slots__ = (
        "_body",
        "_config",
        "_exchange",
        "_joint",
        "_partial",
        "_path",
        "_plan",
        "_reframes",
        "_rest",
        "_resumed",
        "_seen",
        "_services",
        "_struck_by",
    )

    def __init__(
        self, services: Services, config: ResumptionConfig, exchange: Exchange, plan: Plan, path: str, body: bytes
    ) -> None:
        self._services = services
        self._config = config
        self._exchange = exchange
        self._plan = plan
        self._path = path
        self._body = body
        self._partial = PartialAnswer(config.max_text_bytes)
        self._joint: Joint | None = None  # of the continuation under way
        self._rest = b""  # the beginning of an event
        self._seen = 0  # bytes of it that were looked at
        self._resumed = 0
        self._struck_by: FailureKind | None = None  # until a continuation begins
        self._reframes = False  # the client gets whole events; else a worker's bytes as they are

    # When a worker has died

    def accepts(self, worker: Worker, failure: Failure) -> bool:
        """Return whether a stream that ``failure`` has cut on ``worker`` is to go on elsewhere; count it if not."""
        refusal = self._refusal(worker)
        if refusal is not None:
            self._services.observer.resumption("refused", refusal)
            return False
        self._struck_by = failure.kind
        return True

    def _refusal(self, worker: Worker) -> Refusal | None:
        if not self._reframes:
            return Refusal.UNREADABLE
        if self._partial.refusal is not None:
            return self._partial.refusal
        if self._resumed >= self._config.max_per_stream:
            return Refusal.TOO_OFTEN
        if (refusal := refusal_of(self._path, self._body, self._partial.text)) is not None:
            return refusal
        if not has_others(self._services, self._plan, [worker]):
            return Refusal.NO_WORKER
        return None if self._services.budget.spend(monotonic()) else Refusal.NO_BUDGET

    async def continuation(self) -> tuple[bytes, Plan]:
        """Return the body of the request for the rest, and its plan.

        Raises:
            GatewayError: nobody serves the model any more.
        """
        partial = self._partial
        text = partial.text.rstrip()
        prompt_tokens = await self._count(self._body)
        whole_tokens = await self._count(continued_body(self._path, self._body, text))
        if prompt_tokens is not None and whole_tokens is not None:
            sent = whole_tokens - prompt_tokens
        elif partial.usage is not None:
            prompt_tokens, sent = partial.usage.prompt_tokens, partial.usage.completion_tokens
        else:
            prompt_tokens, sent = None, partial.events
        self._joint = Joint(partial.identity, partial.text[len(text) :], prompt_tokens, sent if text else 0)
        body = continued_body(self._path, self._body, text, sent)
        plan = await make_plan(self._services, b"POST", self._path, body)
        return plan.body or body, plan

    async def _count(self, body: bytes) -> int | None:
        """Return the length of a request's prompt in tokens, None where it cannot be told exactly."""
        assert self._plan.model is not None, "the request was routed by its prompt"
        prompts = self._services.prompts
        candidates = self._services.registry.candidates(self._plan.model)
        prompt = await prompts.prompt(await prompts.read(self._path, body), candidates)
        return prompt.tokens if prompt.exact else None

    def failed(self) -> None:
        """The stream ends with an error: count it, if it was to go on."""
        if self._struck_by is not None:
            self._services.observer.resumption("failed", self._struck_by)
            self._struck_by = None

    # What a worker sends

    def on_upstream_head(self, head: ResponseHead) -> None:
        """A stream begins, or something that needs no resumption."""
        self._rest, self._seen = b"", 0
        streams = head.status == 200 and head.is_event_stream and head.framing is Framing.CHUNKED
        if self._joint is not None and not streams:
            self._exchange.abandon(refused_by(head))
            return
        self._reframes = streams
        self._exchange.on_upstream_head(msgspec.structs.replace(head, reframed=True) if streams else head)

    def on_upstream_payload(self, payload: bytes) -> None:
        """A piece of the body."""
        if self._reframes:
            self._rest += payload
        else:
            self._exchange.on_upstream_payload(payload)

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the body, whose payload is known already."""
        if not self._reframes:
            self._exchange.on_upstream_data(data)
            return
        end = end_of_events(self._rest, self._seen)
        passed, self._rest = self._rest[:end], self._rest[end:]
        events = split_events(passed)
        if self._joint is not None:
            events = [self._joint.rewrite(event) for event in events]
            passed = b"".join(events)
        for event in events:
            self._partial.note(event)
        if len(self._rest) > _MAX_EVENT_BYTES:
            self._partial.refuse(Refusal.UNREADABLE)
            passed, self._rest = passed + self._rest, b""
        self._seen = len(self._rest)
        if passed:
            self._pass_on(passed)

    def on_upstream_end(self) -> None:
        """The stream is complete."""
        if self._joint is not None and self._partial.refusal is None:
            self._exchange.on_upstream_lost(Failure(FailureKind.MALFORMED, "ended its stream too early"))
            return
        if self._reframes:
            if self._rest:
                self._pass_on(self._rest)
            self._exchange.on_upstream_data(LAST_CHUNK)
        self._exchange.on_upstream_end()

    def on_upstream_lost(self, failure: Failure) -> None:
        """It ended before that."""
        self._exchange.on_upstream_lost(failure)

    def _pass_on(self, payload: bytes) -> None:
        if self._struck_by is not None:
            self._services.observer.resumption("resumed", self._struck_by)
            self._struck_by = None
            self._resumed += 1
        self._exchange.on_upstream_payload(payload)
        self._exchange.on_upstream_data(chunk(payload))
