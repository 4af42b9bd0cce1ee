"""What a request meets on its way, handed to the relay once at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Final

from gateway.config import AnswerTimeouts, Config, ResumptionConfig
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.pieces import Pieces
from gateway.fleet.health import Health
from gateway.fleet.ledger import Ledger
from gateway.fleet.registry import Registry, Worker
from gateway.index.approximate import ApproximateCache
from gateway.index.base import ChunkIndex
from gateway.observe.observer import Observer
from gateway.prompt.pipeline import PromptPipeline
from gateway.relay.fetches import FetchRates
from gateway.relay.handovers import HandOverBook
from gateway.relay.policies import Policies
from gateway.relay.pool import UpstreamPool
from gateway.relay.retry import RetryBudget
from gateway.relay.sweeper import Sweeper
from gateway.replication.seen import SeenPrompts
from gateway.sharing.news import Outbox

if TYPE_CHECKING:
    from gateway.observe.tracing import Tracing  # needs the extra `otel`

log = logging.getLogger("kvway.relay")

_COMPLAINT_S: Final = 10.0


@dataclass(slots=True)
class Services:
    """The other rooms, as the relay uses them.

    ``outbox`` is there where other replicas are to hear of what is sent where, ``seen`` where hot prefixes are looked
    for, ``tracing`` where spans are made of requests, ``dispatcher`` where requests are held until their turn,
    ``pieces`` where long ones among them go in pieces.
    """

    config: Config
    registry: Registry
    ledger: Ledger
    index: ChunkIndex
    approximate: ApproximateCache
    prompts: PromptPipeline
    policies: Policies
    health: Health
    observer: Observer
    upstream: UpstreamPool
    outbox: Outbox | None = None
    seen: SeenPrompts | None = None
    tracing: Tracing | None = None
    budget: RetryBudget = field(init=False)
    sweeper: Sweeper = field(init=False)
    hand_overs: HandOverBook = field(init=False)
    fetches: FetchRates = field(init=False)
    dispatcher: Dispatcher | None = field(init=False, default=None)
    pieces: Pieces | None = field(init=False, default=None)
    _complained_at: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = RetryBudget(self.config.retries)
        self.sweeper = Sweeper(self.upstream)
        self.hand_overs = HandOverBook(self.config.disaggregation, self.registry, self.outbox)
        self.hand_overs.expose(self.observer)
        self.fetches = FetchRates(self.registry)
        self.fetches.expose(self.observer)
        self.registry.on_change(self._on_change)
        if self.config.dispatch.order != "none":
            self.dispatcher = Dispatcher(self.registry, self.ledger, self.config.dispatch)
            self.dispatcher.expose(self.observer)
        if self.config.dispatch.order == "least-work" and self.config.dispatch.piece_tokens:
            self.pieces = Pieces(self.config, self.registry)
            self.pieces.expose(self.observer)

    def complain(self, message: str, *values: object) -> None:
        """Log the exception being handled, each message once in ten seconds: such faults may strike every request."""
        now = monotonic()
        if now - self._complained_at.get(message, -_COMPLAINT_S) >= _COMPLAINT_S:
            self._complained_at[message] = now
            log.exception(message, *values)

    def timeouts_for(self, model: str) -> AnswerTimeouts:
        """Return a model's own timeouts, else those for all."""
        settings = self.config.models.get(model) or self.config.models.get("*")
        return (settings and settings.timeouts) or self.config.timeouts

    def resumption_for(self, model: str) -> ResumptionConfig:
        """Return a model's own settings of stream resumption, else those for all."""
        settings = self.config.models.get(model) or self.config.models.get("*")
        return (settings and settings.resumption) or self.config.resumption

    def _on_change(self, worker: Worker, joined: bool) -> None:
        if not joined:
            self.upstream.remove(worker)
