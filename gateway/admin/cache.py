"""``/admin/cache``: the API behind ``kvway cache``. A prompt is sent as the body of the request that would bring it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request

from gateway.caches.control import By
from gateway.caches.stats import CacheStats

if TYPE_CHECKING:
    from gateway.app import Gateway

Workers = Annotated[tuple[str, ...], Query()]


def add_cache_paths(app: FastAPI, gateway: Gateway) -> None:
    """Add ``/admin/cache`` to the admin app."""
    control = gateway.caches
    stats = CacheStats(gateway.services, gateway.feeds, gateway.drift, control.coordinator)

    @app.post("/admin/cache/lookup")
    async def lookup(request: Request, path: str = "") -> dict[str, Any]:
        """Say which worker holds how much of a prompt, in which tier."""
        return await control.lookup(path, await request.body())

    @app.post("/admin/cache/pin")
    async def pin(request: Request, path: str = "") -> dict[str, Any]:
        """Pin a prompt in LMCache."""
        return await control.pin(path, await request.body(), pinned=True)

    @app.post("/admin/cache/unpin")
    async def unpin(request: Request, path: str = "") -> dict[str, Any]:
        """Take back one pin."""
        return await control.pin(path, await request.body(), pinned=False)

    @app.post("/admin/cache/prefetch")
    async def prefetch(request: Request, worker: str, by: By = "auto", path: str = "") -> dict[str, Any]:
        """Bring a prompt to a worker."""
        return await control.prefetch(path, await request.body(), worker, by)

    @app.post("/admin/cache/move")
    async def move(request: Request, source: str, target: str, path: str = "") -> dict[str, Any]:
        """Bring a prompt from one worker's LMCache server to another's."""
        return await control.move(path, await request.body(), source, target)

    @app.post("/admin/cache/clear")
    async def clear(request: Request, worker: Workers = (), path: str = "") -> dict[str, Any]:
        """Empty the caches of the named workers, or of all; with a prompt, delete this one from LMCache."""
        body = await request.body()
        rows = await (control.delete(path, body, worker) if body else control.clear(worker))
        return {"workers": rows}

    @app.get("/admin/cache/stats")
    async def cache_stats() -> dict[str, Any]:
        """Say what each worker holds, and how well it serves."""
        return await stats.collect()

    @app.put("/admin/cache/quota")
    async def set_quota(limit_gb: Annotated[float, Query(ge=0)], salt: str = "") -> dict[str, Any]:
        """Bound what the prompts of one cache_salt may hold in LMCache below host memory, in GiB."""
        return await control.set_quota(salt, limit_gb)

    @app.delete("/admin/cache/quota")
    async def remove_quota(salt: str = "") -> dict[str, Any]:
        """Take that bound away."""
        return await control.set_quota(salt, None)
