"""The admin port: metrics for Prometheus, a look at workers and decisions, and the few things one may change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.admin.cache import add_cache_paths
from gateway.admin.explain import explain
from gateway.admin.policy import add_policy_paths
from gateway.admin.public import install_error_handlers
from gateway.admin.recorder import add_recorder_paths
from gateway.errors import BadRequest, NotFound
from gateway.events.lmcache import BadDirectoryEvents
from gateway.fleet.registry import State, Worker
from gateway.observe.exposition import CONTENT_TYPE
from policies.base import COLUMNS

if TYPE_CHECKING:
    from gateway.app import Gateway


def admin_app(gateway: Gateway) -> FastAPI:
    """Build the app behind the admin port."""
    app = FastAPI(title="kvway admin", docs_url="/docs", redoc_url=None)
    install_error_handlers(app, "This is the admin port; /docs shows what it has.")
    add_policy_paths(app, gateway)
    add_recorder_paths(app, gateway)
    add_cache_paths(app, gateway)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus exposition."""
        return Response(gateway.observer.render(), media_type=CONTENT_TYPE)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/admin/config")
    async def config() -> dict[str, Any]:
        """The configuration in force; passwords in URLs are masked."""
        return gateway.config.masked()

    @app.get("/admin/workers")
    async def workers() -> list[dict[str, Any]]:
        """Every worker with its state and its row of the fleet view."""
        return [_describe(gateway, worker) for worker in gateway.registry.workers.values()]

    @app.post("/admin/workers/{name:path}/drain")
    async def drain(name: str) -> dict[str, Any]:
        """Give a worker no new requests; those it has go on."""
        worker = _find(gateway, name)
        gateway.registry.set_state(worker, State.DRAINING)
        return _describe(gateway, worker)

    @app.post("/admin/workers/{name:path}/undrain")
    async def undrain(name: str) -> dict[str, Any]:
        """Take a drained worker back; it serves again after its next good probe."""
        worker = _find(gateway, name)
        if worker.state is State.DRAINING:
            gateway.registry.set_state(worker, State.STARTING)
        return _describe(gateway, worker)

    @app.get("/admin/replication")
    async def replication() -> dict[str, Any]:
        """The hot prefixes of the last look, the most used first, and which failure domains hold them."""
        replicator = gateway.replicator
        held = [] if replicator is None else replicator.held
        return {"enabled": replicator is not None, "prefixes": [msgspec.structs.asdict(each) for each in held]}

    @app.post("/lmcache/events")
    async def lmcache_events(request: Request) -> dict[str, int]:
        """For LMCache's multi-process servers: what they hold, as they tell it to their coordinator."""
        try:
            return await gateway.feeds.take_directory(await request.body())
        except BadDirectoryEvents as error:
            raise BadRequest(str(error)) from None

    @app.post("/admin/explain")
    async def explain_decision(request: Request, path: str = "") -> dict[str, Any]:
        """Say where a request with this body would go now, and why, term by term. Nothing is sent or counted."""
        return await explain(gateway.services, path, await request.body())

    return app


def _find(gateway: Gateway, name: str) -> Worker:
    worker = gateway.registry.workers.get(name)
    if worker is None:
        raise NotFound(f"There is no worker {name!r}; workers: {', '.join(gateway.registry.workers) or 'none'}.")
    return worker


def _describe(gateway: Gateway, worker: Worker) -> dict[str, Any]:
    state = gateway.registry.fleet.state[:, worker.row]
    return {
        "name": worker.name,
        "url": worker.config.url,
        "state": worker.state,
        "role": worker.config.role,
        "domain": worker.config.domain,
        "models": worker.models,
        "slot": worker.slot,
        "block_size": worker.block_size,
        "events": gateway.feeds.describe(worker),
        "view": {name: float(value) for name, value in zip(COLUMNS, state, strict=True)},
    }
