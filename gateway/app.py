"""Builds the service from a ``Config`` and runs it: two ports, the relay, background tasks, one orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import anyio.lowlevel

from gateway.admin.admin import admin_app
from gateway.admin.public import public_app
from gateway.caches.control import CacheControl
from gateway.config import Config
from gateway.errors import ConfigError
from gateway.events.feeds import EventFeeds
from gateway.fleet.discovery.discovery import Discovery
from gateway.fleet.health import Health
from gateway.fleet.ledger import Ledger
from gateway.fleet.metrics import Scraper
from gateway.fleet.models import ModelCards
from gateway.fleet.rates import PrefillRates
from gateway.fleet.registry import Registry, Worker
from gateway.index.approximate import ApproximateCache
from gateway.index.base import ChunkIndex
from gateway.index.memory import MemoryIndex
from gateway.index.pools import PooledIndex
from gateway.index.redis import RedisIndex
from gateway.observe.discovery import export_discovery
from gateway.observe.drift import DriftWatch
from gateway.observe.fleet import export_fleet
from gateway.observe.knowledge import export_knowledge
from gateway.observe.observer import Observer
from gateway.observe.prompts import export_prompts
from gateway.observe.recorder import Recorder
from gateway.pages import collapse_memory
from gateway.prompt.pipeline import PromptPipeline
from gateway.relay.downstream import make_protocol
from gateway.relay.policies import Policies
from gateway.relay.polls import PollClient
from gateway.relay.pool import UpstreamPool
from gateway.relay.services import Services
from gateway.reload import compare, follow_workers
from gateway.replication.replicator import Replicator
from gateway.replication.seen import SeenPrompts
from gateway.serving import Server, raise_descriptor_limit
from gateway.sharing.sharing import Sharing
from gateway.tasks import spawn, stop
from policies.chunks import ChunkHasher

if TYPE_CHECKING:
    from gateway.observe.tracing import Tracing

log = logging.getLogger("kvway")

_THREAD_TURN_S: Final = 0.0005
"""Threads that read long prompts give way to the event loop this soon; Python's default is ten times as long."""

_GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Requests leave no garbage in cycles, so what the collector walks is what is alive."""


class Gateway:
    """One gateway process. Use as ``async with Gateway(config) as gateway``, or ``run`` until a signal.

    Args:
        config: validated configuration.
        reuse_port: share the public port with other processes.

    Raises:
        ConfigError: spans are wanted that cannot be made.
    """

    def __init__(self, config: Config, reuse_port: bool = False) -> None:
        self.config = config
        self.draining = False
        self.hasher = ChunkHasher(config.prompt.chunk_tokens, config.prompt.hash_seed)
        self.registry = Registry()
        self.rates = PrefillRates(self.registry)
        self.ledger = Ledger(self.registry, self.rates.observe)
        self.prompts = PromptPipeline(config)
        self.index: MemoryIndex | RedisIndex
        self.sharing: Sharing | None = None
        if config.index.backend == "redis":
            self.sharing = Sharing(config.index, self.registry, self.hasher)
            self.index, self.approximate, self.feeds = self.sharing.index, self.sharing.approximate, self.sharing.feeds
        else:
            self.index = MemoryIndex(config.index)
            self.approximate = ApproximateCache(self.index)
            self.feeds = EventFeeds(
                self.registry,
                self.index,
                self.hasher,
                on_taken=self.approximate.forget,
                refills=config.index.refill_share > 0,
            )
        self.observer = Observer(self.registry, config.log)
        if self.sharing is not None:
            self.sharing.expose(self.observer)
        self._polls = PollClient(self.registry)
        self.health = Health(self.registry, self._polls.fetch, config.health)
        self.models = ModelCards(self.registry, self._polls.fetch)
        self.scraper = Scraper(self.registry, self._polls.fetch, config.metrics, on_restart=self._restarted)
        export_fleet(self.observer, self.registry, self.ledger, self.health, self.scraper)
        self.drift = DriftWatch(config, self.registry, self.feeds, self.observer.accuracy)
        export_knowledge(self.observer, self.feeds, self.index, self.drift)
        export_prompts(self.observer, self.prompts.checks)
        self.discovery = Discovery(config.discovery, self.registry) if config.discovery else None
        if self.discovery is not None:
            export_discovery(self.observer, self.discovery)
        self.recorder = Recorder(config.recorder, config.prompt.chunk_tokens) if config.recorder.directory else None
        if self.recorder is not None:
            self.recorder.expose(self.observer)
            self.observer.on_finish.append(self.recorder.record)
        self.tracing = self._make_tracing()
        if self.tracing is not None:
            self.observer.on_finish.append(self.tracing.finish)
        replication = config.replication
        seen = SeenPrompts(replication.max_bytes) if replication.enabled else None
        self.services = Services(
            config=config,
            registry=self.registry,
            ledger=self.ledger,
            index=self._with_pools(),
            approximate=self.approximate,
            prompts=self.prompts,
            policies=Policies(config),
            health=self.health,
            observer=self.observer,
            upstream=UpstreamPool(config.timeouts),
            outbox=self.sharing.outbox if self.sharing is not None else None,
            seen=seen,
            tracing=self.tracing,
        )
        if self.sharing is not None:
            self.sharing.on_written = self.services.hand_overs.notices.heard
        self.replicator: Replicator | None = None
        if seen is not None:
            self.replicator = Replicator(replication, self.services, self.hasher, seen, self.sharing)
            self.replicator.expose(self.observer)
        self.caches = CacheControl(config.cache_control, self.services, self.feeds, self.hasher)
        server = config.server
        self._public = Server(
            public_app(self), server.host, server.port, server, make_protocol(self.services), reuse_port
        )
        self._admin = Server(admin_app(self), server.admin_host, server.admin_port, server)
        self._serving: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def port(self) -> int:
        """The public port actually bound."""
        return self._public.port

    @property
    def admin_port(self) -> int:
        """The admin port actually bound."""
        return self._admin.port

    async def start(self) -> None:
        """Bind both ports, then start everything behind them.

        Raises:
            ConfigError: a port cannot be bound.
        """
        self._public.bind()
        self._admin.bind()
        fleet = (self.sharing, self.feeds, self.health, self.models, self.scraper, self.drift)
        for part in (*fleet, self.recorder, self.replicator, self.services.hand_overs.notices):
            if part is not None:
                await part.start()
        for entry in self.config.workers:
            self.registry.add(Worker.from_config(entry))
        if self.discovery is not None:
            await self.discovery.start()
        self._serving = [spawn(server.run_bound(), f"serve {server.port}") for server in (self._public, self._admin)]
        await asyncio.gather(self._public.up.wait(), self._admin.up.wait())
        for task in self._serving:
            if task.done():
                task.result()  # raises what kept it from serving
        # httpx's first request imports anyio's backend, which would hold up the loop, and requests with it, for long.
        await anyio.lowlevel.checkpoint()
        # What is alive now lives as long as the process: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        sys.setswitchinterval(_THREAD_TURN_S)
        log.info(
            "kvway is ready to serve",
            extra={"port": self.port, "admin_port": self.admin_port, "policy": self.config.policy.name},
        )
        if not self.config.workers and self.discovery is None:
            log.warning("no workers are configured: list them under workers:, or see docs/discovery.md")

    async def stop(self) -> None:
        """Drain: readiness false, no new connections, running requests get ``server.drain_s`` to end; then stop all."""
        self.draining = True
        if self.sharing is not None:
            self.sharing.leave()
        self._public.should_exit = True
        if self._serving:
            await asyncio.wait(self._serving[:1])
        self._admin.should_exit = True
        if self._serving:
            await asyncio.wait(self._serving)
        upstream = self.services.upstream
        fleet = (self.replicator, self.discovery, self.drift, self.scraper, self.models, self.health, self._polls)
        notices = self.services.hand_overs.notices
        known = (self.sharing, self.feeds, notices, upstream, self.prompts, self.index)
        for part in (self.caches, *fleet, *known, self.recorder, self.tracing):
            if part is not None:
                await part.close()

    def take_over(self, config: Config) -> None:
        """Go on with another configuration as far as it can change while requests run, and log how far that is."""
        reload = compare(self.config, config)
        self.services.policies.follow(self.config, reload.config)
        follow_workers(self.registry, self.config.workers, reload.config.workers)
        self.config = reload.config
        self.services.index = self._with_pools()
        reload.report()

    async def run(self, configs: AsyncIterator[Config]) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second SIGINT ends the draining at once.

        Args:
            configs: whenever the configuration was read again, what it is now; see ``take_over``.
        """
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def on_signal(number: signal.Signals) -> None:
            if asked.is_set() and number == signal.SIGINT:
                self._public.force_exit = self._admin.force_exit = True
            asked.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        raise_descriptor_limit()
        collapse_memory()
        async with self:
            following = spawn(self._follow(configs), "follow the configuration")
            await asked.wait()
            await stop(following)
            log.info("draining", extra={"in_flight": self.ledger.in_flight, "drain_s": self.config.server.drain_s})

    async def _follow(self, configs: AsyncIterator[Config]) -> None:
        async for config in configs:
            self.take_over(config)

    def _make_tracing(self) -> Tracing | None:
        """Return what makes spans, where they are wanted.

        Raises:
            ConfigError: the extra is not installed, or its settings in the environment cannot be used.
        """
        if self.config.tracing.endpoint is None:
            return None
        try:
            from gateway.observe.tracing import Tracing
        except ImportError as error:
            raise ConfigError(f"tracing.endpoint needs OpenTelemetry ({error}): pip install 'kvway[otel]'") from None
        return Tracing(self.config)

    def _with_pools(self) -> ChunkIndex:
        """Return the index as requests see it. Without shared pools nothing lies between."""
        if not self.config.discovery.may_find_pools and not any(worker.pool for worker in self.config.workers):
            return self.index
        if isinstance(self.index, RedisIndex):
            return PooledIndex(self.index, self.feeds.pools, self.registry, self.index.slots_of)
        return PooledIndex(self.index, self.feeds.pools, self.registry)

    def _restarted(self, worker: Worker) -> None:
        """A worker's process is a new one: what the index knew of the old one is void."""
        self.feeds.restarted(worker)
        self.models.refresh(worker)
