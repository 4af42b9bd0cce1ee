"""Keeps the registry equal to what the sources say together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

import httpx

from gateway.config_workers import DiscoveryConfig, WorkerConfig
from gateway.fleet.discovery.dns import DnsSource
from gateway.fleet.discovery.engine import ask_engine
from gateway.fleet.discovery.file import FileSource
from gateway.fleet.discovery.found import Found, Reporter, Source
from gateway.fleet.discovery.kubernetes import KubernetesSource
from gateway.fleet.polling import FetchFailed, control_client
from gateway.fleet.registry import Registry, State, Worker
from gateway.tasks import spawn, stop

log = logging.getLogger("kvway.discovery")

_RETRY_S: Final = 1.0


def sources_of(config: DiscoveryConfig) -> Iterator[tuple[str, Source]]:
    """Yield name and source for every entry of the configuration, in its order.

    Raises:
        ConfigError: one of them cannot work here.
    """
    for number, kubernetes in enumerate(config.kubernetes):
        yield f"kubernetes[{number}]", KubernetesSource(kubernetes)
    for number, dns in enumerate(config.dns):
        yield f"dns[{number}]", DnsSource(dns)
    for number, file in enumerate(config.files):
        yield f"files[{number}]", FileSource(file)


class Discovery:
    """Adds what is found to the registry, and removes what is gone. What has not changed is not touched.

    Args:
        config: the sources.
        registry: where workers join and leave. Those that others have added are left alone.

    Attributes:
        reporters: how each source is doing.

    Raises:
        ConfigError: a source cannot work here.
    """

    def __init__(self, config: DiscoveryConfig, registry: Registry) -> None:
        self._registry = registry
        self._client = control_client()
        self._members: dict[str, _Member] = {}
        self._sources = [(source, Reporter(name, self._reconcile)) for name, source in sources_of(config)]
        self._tasks: list[asyncio.Task[None]] = []
        self._doubles: set[str] = set()  # told in the log

    @property
    def reporters(self) -> list[Reporter]:
        """How each source is doing, in the order of the configuration."""
        return [reporter for _, reporter in self._sources]

    async def start(self) -> None:
        """Begin to look."""
        self._tasks = [spawn(_keep_running(*pair), f"discovery: {pair[1].name}") for pair in self._sources]

    async def close(self) -> None:
        """Stop looking; the workers stay."""
        await stop(*self._tasks, *(member.joining for member in self._members.values()))
        await self._client.aclose()

    def _reconcile(self) -> None:
        wanted = self._wanted()
        for name, member in list(self._members.items()):
            if name not in wanted or not member.is_still(wanted[name]):
                member.leave()
                del self._members[name]
        for name, found in wanted.items():
            if name in self._members:
                self._members[name].accept(found.accepts)
            elif found.accepts:
                self._members[name] = _Member(found, self._registry, self._client)

    def _wanted(self) -> dict[str, Found]:
        """Return what all sources have found, by name.

        Of those of one source that share a name or an address, one that accepts requests counts (the other is a pod on
        its way out), else the first.
        """
        ours = {worker for member in self._members.values() for worker in member.workers}
        listed = [worker for worker in self._registry.workers.values() if worker not in ours]
        wanted: dict[str, Found] = {}
        names = {worker.name for worker in listed}
        engines = {(worker.config.url, worker.config.data_parallel_rank) for worker in listed}
        doubles = set()
        for reporter in self.reporters:
            for found in sorted(reporter.workers, key=lambda found: not found.accepts):
                name, engine = found.config.label, (found.config.url, found.config.data_parallel_rank)
                if name in names or engine in engines:
                    doubles.add(f"{name} of {reporter.name}")
                    continue
                names.add(name)
                engines.add(engine)
                wanted[name] = found
        for double in doubles - self._doubles:
            log.warning("%s is known already, by name or address; the first counts", double)
        self._doubles = doubles
        return wanted


class _Member:
    """One engine that was found: a worker, or one per data-parallel rank, which have joined or are about to.

    Args:
        found: the engine. It accepts requests.
        registry: where it joins.
        client: to ask it.
    """

    def __init__(self, found: Found, registry: Registry, client: httpx.AsyncClient) -> None:
        self._found = found
        self._registry = registry
        self._client = client
        self._drained: set[Worker] = set()  # by us; an operator may drain workers, too
        self._accepts = True
        self.workers: list[Worker] = []
        self.joining: asyncio.Task[None] | None = None
        if found.asks:
            self.joining = spawn(self._ask(), f"discovery: ask {found.config.label}")
        else:
            self._join([found.config])

    def is_still(self, found: Found) -> bool:
        """Whether ``found`` is this engine, unchanged but for whether it accepts requests."""
        return (found.config, found.life, found.asks) == (self._found.config, self._found.life, self._found.asks)

    def accept(self, accepts: bool) -> None:
        """Give its workers new requests, or no more."""
        self._accepts = accepts
        for worker in self.workers:
            if not accepts and worker.state is not State.DRAINING:
                self._drained.add(worker)
                self._registry.set_state(worker, State.DRAINING)
                log.info("worker is drained", extra={"worker": worker.name})
            elif accepts and worker in self._drained:
                self._drained.remove(worker)
                if worker.state is State.DRAINING:
                    self._registry.set_state(worker, State.STARTING)  # its next good probe makes it ready
                    log.info("worker may take requests again", extra={"worker": worker.name})

    def leave(self) -> None:
        """Take its workers out of the registry; their running requests go on."""
        if self.joining is not None:
            self.joining.cancel()
        for worker in self.workers:
            if self._registry.workers.get(worker.name) is worker:
                self._registry.remove(worker.name)
                log.info("worker has left", extra={"worker": worker.name})

    def _join(self, entries: list[WorkerConfig]) -> None:
        self.workers = [Worker.from_config(entry) for entry in entries]
        for worker in self.workers:
            self._registry.add(worker)
            log.info("worker has joined", extra={"worker": worker.name, "url": worker.config.url})
        self.accept(self._accepts)

    async def _ask(self) -> None:
        told = False
        while True:
            try:
                entries = await ask_engine(self._client, self._found.config)
                break
            except FetchFailed as failure:
                if not told:
                    log.info("%s has been found: %s", self._found.config.label, failure)
                told = True
                await asyncio.sleep(_RETRY_S)
        self._join(entries)


async def _keep_running(source: Source, reporter: Reporter) -> None:
    while True:
        try:
            await source.run(reporter)
        except Exception as error:
            log.exception("%s failed", reporter.name)
            reporter.failed(f"it failed: {error or type(error).__name__}")
        await asyncio.sleep(_RETRY_S)
