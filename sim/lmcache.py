"""KV that one simulated worker writes to another, as LMCache does with ``enable_pd``.

The prefill request names a decode worker (``disagg_spec``). When the prompt is computed, its KV is written there, into
a buffer that knows it by the tokens, not by the request; then whoever listens at ``pd_proxy_host`` is told, once for
each rank. The decode request says nothing of it: the decode worker finds what was written, once, or computes.

Engines write by NIXL, after a handshake over ``receiver_init_port`` and ``receiver_alloc_port``. Simulated ones write
over HTTP, to the first ``receiver_alloc_port``, which is the other worker's HTTP port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import httpx
import mmh3
import msgspec
import zmq
import zmq.asyncio
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from sim.cache import Tokens
from sim.clock import WorkerClock
from sim.faults import Faults
from sim.protocol import GenerationBody, bad_request
from sim.settings import WorkerSettings

WRITE_PATH: Final = "/sim/kv/{key}"
_PATIENCE_S: Final = 60.0
_encode = msgspec.msgpack.encode


class _Spec(msgspec.Struct):
    """Where a prefill worker is to write a prompt's KV; one port for each rank."""

    req_id: str
    receiver_host: str
    receiver_init_port: list[int]
    receiver_alloc_port: list[int]


class Writer:
    """One worker's writes, in both directions.

    Args:
        settings: the worker's.
        clock: its clock; what was written is kept for ``lease_s`` of it.
        faults: transfers that get lost, leases that expire.
        arrive: waits while KV of so many tokens is on its way here.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        clock: WorkerClock,
        faults: Faults,
        arrive: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._faults = faults
        self._arrive = arrive
        self._written: dict[str, tuple[int, float]] = {}  # prompt → tokens, and until when they are kept
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None
        self._proxy: zmq.asyncio.Socket | None = None

    def drop(self) -> None:
        """Give up the transfers under way, in both directions."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Give them up, and close the connection to whoever is notified."""
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    # The prefill worker

    def begin(self, body: GenerationBody, prompt: Tokens, client: httpx.AsyncClient) -> None:
        """Begin to write a prompt's KV to the worker that its request names; the answer does not wait for it.

        Args:
            body: of the request.
            prompt: its tokens.
            client: for other workers.
        """
        spec = spec_of(body)
        if spec is not None:
            self._keep(self._write(spec, key_of(body, prompt), len(prompt), client))

    def _keep(self, transfer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(transfer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _write(self, spec: _Spec, key: str, tokens: int, client: httpx.AsyncClient) -> None:
        host = f"[{spec.receiver_host}]" if ":" in spec.receiver_host else spec.receiver_host
        url = f"http://{host}:{spec.receiver_alloc_port[0]}{WRITE_PATH.format(key=key)}"
        try:
            answer = await client.put(url, params={"tokens": tokens}, timeout=_PATIENCE_S)
        except httpx.HTTPError:
            return
        if answer.status_code != 200 or self._settings.lmcache_proxy is None:
            return
        if self._proxy is None:
            self._context = zmq.asyncio.Context()
            self._proxy = self._context.socket(zmq.PUSH)
            self._proxy.ipv6 = "[" in self._settings.lmcache_proxy
            self._proxy.connect(self._settings.lmcache_proxy)
        for _ in spec.receiver_init_port:
            await self._proxy.send(_encode({"type": "ProxyNotif", "req_id": spec.req_id}))

    # The decode worker

    async def receive(self, request: HttpRequest) -> Response:
        """``PUT /sim/kv/{key}``: take KV of ``tokens`` tokens; answered when it has arrived."""
        tokens = int(request.query_params["tokens"])
        arriving = self._keep(self._arrive(tokens))
        await asyncio.wait([arriving])
        if arriving.cancelled() or self._faults.meet("lose_transfer"):
            return JSONResponse({"error": "the transfer got lost"}, 500)
        now = self._clock.now()
        self._written = {key: held for key, held in self._written.items() if held[1] > now}
        lease_s = 0.0 if self._faults.meet("expire_lease") else self._settings.lease_s
        self._written[request.path_params["key"]] = tokens, now + lease_s
        return JSONResponse({})

    def take(self, body: GenerationBody, prompt: Tokens) -> int:
        """Return how many of a prompt's tokens were written here, and forget them; 0 where there are none."""
        tokens, kept_until = self._written.pop(key_of(body, prompt), (0, 0.0))
        return tokens if kept_until > self._clock.now() else 0


def spec_of(body: GenerationBody) -> _Spec | None:
    """Return where a request wants its prompt's KV written; None where it does not say.

    Raises:
        ApiError: 400, what it says cannot be understood.
    """
    spec: Any = (body.kv_transfer_params or {}).get("disagg_spec")
    if spec is None:
        return None
    try:
        found = msgspec.convert(spec, _Spec)
    except msgspec.ValidationError as error:
        raise bad_request(f"disagg_spec: {error}", "kv_transfer_params") from None
    if not found.receiver_alloc_port:
        raise bad_request("disagg_spec: receiver_alloc_port is empty", "kv_transfer_params")
    return found


def key_of(body: GenerationBody, prompt: Tokens) -> str:
    """Return what a prompt's KV is called: the same for the same tokens, model or adapter, and salt."""
    about = msgspec.json.encode([body.model, body.cache_salt])
    return mmh3.mmh3_x64_128_digest(about + prompt.tobytes()).hex()
