"""KV that one simulated worker hands to another, by the protocols that engines have for it.

The prefill worker *offers* the KV of a prompt under a key and keeps it for the time of a lease. The decode worker
*fetches* it, over HTTP from the other worker, and then waits as long as the KV would be on its way. What the key is and
how the decode worker learns of it is what the protocols differ in:

- ``nixl`` (vLLM): the prefill answer brings ``kv_transfer_params``, and the decode request brings them on. Where the
  decode worker keeps what it has (``pull_back_s``), its answer brings some for the prefill request of the next turn.
- ``mooncake`` (vLLM): both requests bring the same ``transfer_id``, at the same time.
- ``sglang``: both bring the same ``bootstrap_room``; the prefill answer ends when the KV has been fetched.
- ``lmcache``: nothing is fetched, the prefill worker writes; see ``sim.lmcache``.

Blocks are not held back for a lease: what is offered are numbers, which need no room.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import httpx
import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from sim.cache import Tokens
from sim.clock import WorkerClock
from sim.faults import Faults
from sim.lmcache import Writer, spec_of
from sim.protocol import ApiError, GenerationBody, bad_request
from sim.settings import WorkerSettings

FETCH_PATH: Final = "/sim/kv/{key}"


@dataclass(slots=True, frozen=True)
class Received:
    """KV that has arrived.

    Attributes:
        tokens: leading tokens of the prompt that need not be computed.
        reported_tokens: what the answer's usage calls cached; None: what the worker itself had cached.
    """

    tokens: int
    reported_tokens: int | None


@dataclass(slots=True, eq=False)
class _Offer:
    tokens: int
    cached_tokens: int
    expires_at: float
    fetched: asyncio.Event = field(default_factory=asyncio.Event)


class _Remote(msgspec.Struct):
    """Where a NIXL worker's KV is, of what its ``kv_transfer_params`` say."""

    remote_host: str
    remote_port: int
    remote_request_id: str
    remote_num_tokens: int = sys.maxsize


class HandOvers:
    """One worker's hand-overs, in both directions.

    Args:
        settings: the worker's.
        clock: its clock; the link and leases run on it.
        faults: transfers that get lost, leases that expire, a slow link.
        kv_bytes_per_token: of its model.

    Attributes:
        address: host and port of the worker's HTTP server, once that is known.
        writer: where KV is written and not fetched.
    """

    def __init__(self, settings: WorkerSettings, clock: WorkerClock, faults: Faults, kv_bytes_per_token: float) -> None:
        self.address = ("", 0)
        self.writer = Writer(settings, clock, faults, self._arrive)
        self._settings = settings
        self._clock = clock
        self._faults = faults
        self._seconds_per_token = kv_bytes_per_token / (settings.link_gb_s * 1e9)
        self._engine_id = str(uuid4())
        self._offers: dict[str, _Offer] = {}
        self._offered = asyncio.Condition()
        self._waits: set[asyncio.Timeout] = set()
        self._gone = False
        self._link_free_at = 0.0
        self._client: httpx.AsyncClient | None = None

    def drop(self) -> None:
        """Wait for no other worker any more, nor write to one."""
        self._gone = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)
        self.writer.drop()

    async def close(self) -> None:
        """Close the connections to other workers."""
        await self.writer.close()
        if self._client is not None:
            await self._client.aclose()

    # The prefill worker

    def key_to_offer(self, body: GenerationBody, request_id: str) -> str | None:
        """Return under which key the prompt's KV is to be offered; None where the request asks for no hand-over.

        Raises:
            ApiError: 400, an SGLang worker of one role was sent a request that concerns no other worker, or LMCache
                cannot understand which one it concerns.
        """
        connector, params = self._settings.pd, body.kv_transfer_params or {}
        if connector == "sglang":
            if self._settings.role != "mixed" and body.bootstrap_room is None:
                raise bad_request("Disaggregated request received without bootstrap room id.", "bootstrap_room")
            return str(body.bootstrap_room) if self._settings.role == "prefill" else None
        if connector == "lmcache":
            spec = spec_of(body)
            return spec.req_id if spec is not None else None
        if connector is None or not params.get("do_remote_decode"):
            return None
        if connector == "nixl":
            return f"{request_id}-{uuid4().hex[:8]}"
        return str(params.get("transfer_id", ""))

    def key_to_keep(self, body: GenerationBody, request_id: str) -> str | None:
        """Return under which key a decode worker keeps a request's KV for the next turn; None where it does not."""
        handed_over = self._settings.pd == "nixl" and (body.kv_transfer_params or {}).get("do_remote_prefill")
        return f"{request_id}-{uuid4().hex[:8]}" if handed_over and self._settings.pull_back_s else None

    async def keep(self, key: str, tokens: int) -> dict[str, Any]:
        """Keep the KV of a prompt and its answer.

        Args:
            key: from ``key_to_keep``.
            tokens: how much of both has been computed.

        Returns:
            The answer's ``kv_transfer_params``.
        """
        kept = self._hold(key, tokens, tokens, self._settings.pull_back_s)
        about = self._params(key, tokens) | {"remote_blocks_expiry_time": kept.expires_at}
        return about | {"do_remote_prefill": False, "do_remote_decode": True}

    async def offer(self, key: str, tokens: int, cached_tokens: int) -> dict[str, Any] | None:
        """Offer a prompt's KV.

        Args:
            key: from ``key_to_offer``.
            tokens: length of the prompt.
            cached_tokens: tokens of it that were not computed but found in the cache.

        Returns:
            The answer's ``kv_transfer_params``, None where the protocol has none.
        """
        lease_s = 0.0 if self._faults.meet("expire_lease") else self._settings.lease_s
        offer = self._hold(key, tokens, cached_tokens, lease_s)
        async with self._offered:
            self._offered.notify_all()
        if self._settings.pd == "sglang":
            await self._until(offer.fetched.wait(), self._settings.lease_s)
        if self._settings.pd != "nixl":
            return None
        return self._params(key, tokens) | {"remote_prefill_cached_tokens": cached_tokens}

    def _hold(self, key: str, tokens: int, cached_tokens: int, for_s: float) -> _Offer:
        """Hold KV for another worker, and no longer what nobody has fetched in time."""
        now = self._clock.now()
        self._offers = {name: one for name, one in self._offers.items() if one.expires_at > now}
        offer = self._offers[key] = _Offer(tokens, cached_tokens, now + for_s)
        return offer

    def write(self, body: GenerationBody, prompt: Tokens, first_token: int) -> dict[str, Any]:
        """Begin to write a prompt's KV where its request wants it; return the answer's ``kv_transfer_params``."""
        self.writer.begin(body, prompt, self._http())
        return {"first_tok": first_token}

    def _params(self, key: str, tokens: int) -> dict[str, Any]:
        host, port = self.address
        blocks = -(-tokens // self._settings.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": key,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    async def serve(self, request: HttpRequest) -> Response:
        """``GET /sim/kv/{key}``: hand the KV over, waiting ``wait`` seconds for it to be there; 404 where it is not."""
        key, wait_s = request.path_params["key"], float(request.query_params.get("wait", 0))
        async with self._offered:
            await self._until(self._offered.wait_for(lambda: key in self._offers), wait_s)
        offer = self._offers.pop(key, None)
        if offer is None or offer.expires_at <= self._clock.now():
            return JSONResponse({"error": f"no KV is held under {key!r}"}, 404)
        offer.fetched.set()
        return JSONResponse({"tokens": offer.tokens, "cached_tokens": offer.cached_tokens})

    async def query(self, _: HttpRequest) -> Response:
        """``GET /query`` of Mooncake's bootstrap server: which engine this is."""
        worker_addr = {"0": {"0": "{}:{}".format(*self.address)}}
        return JSONResponse({"0": {"engine_id": self._engine_id, "worker_addr": worker_addr}})

    # The decode worker

    async def receive(self, body: GenerationBody, prompt: Tokens) -> Received | None:
        """Fetch a prompt's KV and wait until it has arrived; None where the request tells of none.

        Raises:
            ApiError: 500, it is not there any more, or got lost on its way.
        """
        if self._settings.pd == "lmcache":
            written = self.writer.take(body, prompt)
            return Received(written, min(written, len(prompt) - 1)) if written else None
        source = self._source(body)
        if source is None:
            return None
        url, wait_s, most_tokens = source
        try:
            answer = await self._http().get(url, params={"wait": wait_s}, timeout=wait_s + 5)
        except (httpx.HTTPError, httpx.InvalidURL, ExceptionGroup) as error:  # a group: no port has that number
            raise _not_loaded(f"{url}: {type(error).__name__}") from None
        if answer.status_code != 200 or self._faults.meet("lose_transfer"):
            raise _not_loaded(f"{url}: {answer.status_code}")
        offered = answer.json()
        if (body.kv_transfer_params or {}).get("do_remote_decode"):
            # the prefill of a next turn: what is asked for, and counts as cached here
            tokens = min(offered["tokens"], most_tokens)
            await self._arrive(tokens)
            return Received(tokens, tokens)
        await self._arrive(offered["tokens"])
        if self._settings.pd == "nixl":
            reported = offered["cached_tokens"]
        else:  # vLLM counts what came over the link as cached, SGLang what it had itself
            reported = len(prompt) if self._settings.pd == "mooncake" else None
        return Received(offered["tokens"], reported)

    def _source(self, body: GenerationBody) -> tuple[str, float, int] | None:
        """Return where a prompt's KV is, for how long to wait for it to be there, and how many tokens to take of it.

        Engines compute a prompt themselves where that is not said in full.
        """
        params, lease_s, whole = body.kv_transfer_params or {}, self._settings.lease_s, sys.maxsize
        if self._settings.pd == "sglang":
            host, port, room = body.bootstrap_host, body.bootstrap_port, body.bootstrap_room
            if self._settings.role == "prefill" or host is None or port is None or room is None:
                return None
            return f"http://{host}:{port}/sim/kv/{room}", lease_s, whole
        if self._settings.pd is None or not (params.get("do_remote_prefill") or params.get("remote_block_ids")):
            return None
        if self._settings.pd == "nixl":
            try:
                at = msgspec.convert(params, _Remote)
            except msgspec.ValidationError:
                return None
            return f"http://{at.remote_host}:{at.remote_port}/sim/kv/{at.remote_request_id}", 0.0, at.remote_num_tokens
        address, transfer = params.get("remote_bootstrap_addr"), params.get("transfer_id")
        return None if address is None or transfer is None else (f"{address}/sim/kv/{transfer}", lease_s, whole)

    def _http(self) -> httpx.AsyncClient:
        self._client = self._client or httpx.AsyncClient(trust_env=False)
        return self._client

    async def _arrive(self, tokens: int) -> None:
        """Wait while KV is on its way; transfers share the link one after the other."""
        slow = self._faults.active("slow_link")
        begin = max(self._clock.now(), self._link_free_at)
        self._link_free_at = begin + tokens * self._seconds_per_token * (slow.factor if slow else 1)
        await asyncio.sleep((self._link_free_at - self._clock.now()) / self._clock.speed)

    async def _until(self, event: Awaitable[object], seconds: float) -> None:
        """Wait for something, but not longer than ``seconds`` of the worker's clock, nor once the worker is gone."""
        try:
            async with asyncio.timeout(0 if self._gone else seconds / self._clock.speed) as wait:
                self._waits.add(wait)
                try:
                    await event
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            pass


def _not_loaded(what: str) -> ApiError:
    return ApiError(500, "InternalServerError", f"KV cache could not be loaded from {what}")
