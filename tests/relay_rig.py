"""The relay between real sockets and real rooms; only the workers and the clients are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import io
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from gateway.config import Config
from gateway.fleet.health import Health
from gateway.fleet.ledger import Ledger
from gateway.fleet.registry import Registry, State, Worker
from gateway.index.approximate import ApproximateCache
from gateway.index.memory import MemoryIndex
from gateway.observe.observer import Observer
from gateway.observe.record import Outcome, RequestRecord
from gateway.prompt.pipeline import PromptPipeline
from gateway.relay.downstream import make_protocol
from gateway.relay.policies import Policies
from gateway.relay.polls import PollClient
from gateway.relay.pool import UpstreamPool
from gateway.relay.services import Services
from tests.peers import FakeWorker, Wire, connect, eventually

MODEL = "m"


class WitnessedObserver(Observer):
    """Keeps the records it is given."""

    records: list[RequestRecord]

    def finish(self, record: RequestRecord) -> None:
        self.records.append(record)
        super().finish(record)


class WitnessedHealth(Health):
    """Notes who was blamed for what."""

    blamed: list[tuple[str, str]]

    def failed(self, worker: Worker, kind: str) -> None:
        self.blamed.append((worker.name, kind))
        super().failed(worker, kind)


@dataclass
class Rig:
    """A relay that serves.

    Attributes:
        port: where.
        services: what it was given.
        records: of the requests that are over.
        blamed: worker and kind of every failure that counted against a worker's health.
        app: what answers beside the relay.
        connections: the client connections that are open.
    """

    port: int
    services: Services
    records: list[RequestRecord]
    blamed: list[tuple[str, str]]
    app: FastAPI
    connections: set[Any]

    def connect(self, ssl_context: ssl.SSLContext | None = None) -> contextlib.AbstractAsyncContextManager[Wire]:
        """Open a client connection."""
        return connect(self.port, ssl_context)

    async def settled(self) -> RequestRecord:
        """Wait until nothing is in flight and every counter is back to zero; return the last record."""
        state = self.services.registry.fleet.state
        columns = ("pending_prefill_tokens", "pending_prefill_s", "running", "decode_tokens")
        await eventually(lambda: bool(self.records) and not self.services.ledger.in_flight)
        for column in columns:
            assert not self.services.registry.fleet.column(column).any(), f"{column} is not back to zero: {state}"
        return self.records[-1]

    async def outcome(self) -> Outcome:
        """Return how the last request ended, once nothing is in flight."""
        return (await self.settled()).outcome


@contextlib.asynccontextmanager
async def relay(
    workers: Sequence[FakeWorker | str],
    *,
    worker_tls: ssl.SSLContext | None = None,
    tls: tuple[Path, Path] | None = None,
    log: io.BytesIO | None = None,
    settings: Sequence[dict[str, Any]] = (),
    **sections: Any,
) -> AsyncIterator[Rig]:
    """Serve a relay in front of ``workers``, all of them ready and serving the model ``MODEL``.

    Args:
        workers: scripted workers, or URLs; named ``w0``, ``w1``, …
        worker_tls: how to trust workers behind https.
        tls: certificate and key of the public port.
        log: where request lines go.
        settings: of each worker, besides; none where nothing is given.
        sections: of the configuration.
    """
    urls = [worker if isinstance(worker, str) else worker.url for worker in workers]
    besides = settings or [{}] * len(urls)
    entries = [
        {"url": url, "name": f"w{n}", "models": [MODEL], **each}
        for n, (url, each) in enumerate(zip(urls, besides, strict=True))
    ]
    sections.setdefault("policy", {"name": "round-robin"})
    sections.setdefault("prompt", {"chunk_tokens": 16})
    config = Config(workers=entries, **sections)
    registry = Registry()
    index = MemoryIndex(config.index)
    observer = WitnessedObserver(registry, config.log, log or io.BytesIO())
    health = WitnessedHealth(registry, PollClient(registry).fetch, config.health)
    observer.records, health.blamed = [], []
    services = Services(
        config=config,
        registry=registry,
        ledger=Ledger(registry),
        index=index,
        approximate=ApproximateCache(index),
        prompts=PromptPipeline(config),
        policies=Policies(config),
        health=health,
        observer=observer,
        upstream=UpstreamPool(config.timeouts, worker_tls),
    )
    for entry in config.workers:
        worker = Worker.from_config(entry)
        registry.add(worker)
        worker.slot = await index.acquire_slot(worker.name)
        registry.set_state(worker, State.READY)
    notices = services.hand_overs.notices
    await notices.start()
    app = _app()
    uvicorn_config = uvicorn.Config(
        app,
        http=make_protocol(services),
        log_config=None,
        access_log=False,
        ssl_certfile=tls and tls[0],
        ssl_keyfile=tls and tls[1],
    )
    uvicorn_config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: uvicorn_config.http_protocol_class(config=uvicorn_config, server_state=state, app_state={}),
        "127.0.0.1",
        0,
        ssl=uvicorn_config.ssl,
    )
    try:
        port = server.sockets[0].getsockname()[1]
        yield Rig(port, services, observer.records, health.blamed, app, state.connections)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await eventually(lambda: not state.connections and not state.tasks)
        for part in (notices, services.upstream, health, services.prompts, index):
            await part.close()


def _app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/echo")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    return app
