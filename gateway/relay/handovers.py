"""What was handed over between workers: how often, how fast, and what became of it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Final

import httpx
import numpy as np

from gateway.config_workers import DisaggregationConfig
from gateway.fleet.polling import control_client
from gateway.fleet.registry import Registry, Worker
from gateway.observe.observer import Observer
from gateway.relay.notices import Notices
from gateway.relay.turns import Turns
from gateway.sharing.news import Outbox
from gateway.tasks import spawn
from policies.base import Floats
from policies.disaggregation import LinkRates

_QUERY_TIMEOUT_S: Final = 2.0
_ENGINE_TTL_S: Final = 10.0  # a restarted engine has another id
_PAIR: Final = ("prefill", "decode")
_MAX_TABLES: Final = 64  # of links between two pools: one per model and adapter

Pair = tuple[str, str]
"""Names of a prefill and a decode worker."""


class HandOverBook:
    """Accounts of hand-overs by pair of workers.

    Args:
        config: bandwidth to start from.
        registry: whose workers; what concerns those that leave is forgotten.
        outbox: tells the other replicas, where there may be any.

    Attributes:
        rates: bandwidth between pairs.
        turns: what decode workers keep of conversations.
        notices: what LMCache's prefill workers say.
    """

    def __init__(self, config: DisaggregationConfig, registry: Registry, outbox: Outbox | None = None) -> None:
        self._registry = registry
        self.rates = LinkRates([rate * 1e9 for rate in (config.link_gb_s, *config.near_gb_s)], config.latency_s)
        self.turns = Turns(config.pull_back_s)
        self.notices = Notices(config.lmcache_bind, outbox)
        self._tables: dict[tuple[Sequence[Worker], Sequence[Worker]], Floats] = {}
        self._outcomes: Counter[tuple[str, str, str]] = Counter()
        self._decisions: Counter[str] = Counter()
        self._ttft_s: defaultdict[Pair, float] = defaultdict(float)
        self._ttfts: Counter[Pair] = Counter()
        self._transfer_s: defaultdict[Pair, float] = defaultdict(float)
        self._transfers: Counter[Pair] = Counter()
        self._moved_bytes: defaultdict[Pair, float] = defaultdict(float)
        self._engines: dict[Worker, tuple[str, float]] = {}
        self._asked: dict[Worker, asyncio.Task[str | None]] = {}
        # By decode worker, the prefill workers whose KV has not arrived there, since any last did.
        self._lost_from: defaultdict[str, set[str]] = defaultdict(set)
        for worker in registry.workers.values():
            self._on_change(worker, joined=True)
        registry.on_change(self._on_change)

    def expose(self, observer: Observer) -> None:
        """Export the accounts."""
        about = "Hand-overs from prefill to decode worker; abandoned: KV was ready, and its request was over."
        observer.counter("kvway_handovers_total", about, lambda: self._outcomes, (*_PAIR, "outcome"))
        about = "Requests by whether they were to go over two workers."
        observer.counter("kvway_handover_decisions_total", about, lambda: self._decisions, ("decision",))
        if self.turns.enabled:
            about = "Turns that decode workers keep for the next one's prefill to pull, by what became of them."
            observer.counter("kvway_handover_turns_total", about, lambda: self.turns.outcomes, ("outcome",))
        for name, about, counted in (
            ("ttft_seconds", "From request to first token, streams that were handed over.", self._ttft_s),
            ("streams", "These streams.", self._ttfts),
            ("transfer_seconds", "From the end of prefill to the first token, where both were seen.", self._transfer_s),
            ("transfers", "Transfers that took this time.", self._transfers),
            ("bytes", "KV cache that they moved, by the configured kv_bytes_per_token.", self._moved_bytes),
        ):
            observer.counter(f"kvway_handover_{name}_total", about, lambda counted=counted: counted, _PAIR)  # type: ignore[misc]

    def decided(self, decision: str) -> None:
        """Count a decision: ``apart`` or ``whole``."""
        self._decisions[decision] += 1

    def ended(self, prefill: Worker, decode: str, outcome: str) -> None:
        """Count what became of a hand-over; ``decode`` is empty where no decode worker was asked."""
        self._outcomes[prefill.name, decode, outcome] += 1
        if outcome == "completed":
            self._lost_from.pop(decode, None)

    def lost(self, prefill: Worker, decode: Worker) -> bool:
        """Note that KV did not arrive; return whether that is the decode worker's fault.

        It is taken for that once it has failed to load the KV of two prefill workers, and none has arrived between.
        """
        lost_from = self._lost_from[decode.name]
        lost_from.add(prefill.name)
        return len(lost_from) > 1

    def first_token(self, prefill: Worker, decode: Worker, ttft_s: float) -> None:
        """Note the TTFT of a stream."""
        pair = (prefill.name, decode.name)
        self._ttft_s[pair] += ttft_s
        self._ttfts[pair] += 1

    def transferred(self, prefill: Worker, decode: Worker, size_bytes: float, seconds: float) -> None:
        """Note a transfer and learn the link's bandwidth from it."""
        pair = (prefill.name, decode.name)
        self.rates.observe(*pair, size_bytes, seconds)
        for (prefills, decodes), table in self._tables.items():
            if prefill in prefills and decode in decodes:
                table[prefills.index(prefill), decodes.index(decode)] = 1 / self.rates.bytes_per_s(*pair)
        self._transfer_s[pair] += seconds
        self._transfers[pair] += 1
        self._moved_bytes[pair] += size_bytes

    def links(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> Floats:
        """Return the seconds per byte from each of ``n`` to each of ``m`` workers, ``[n, m]``.

        They are infinite where the two have no protocol in common, and to workers that prefill only, which are offered
        as ``decodes`` once no other is ready. The array is kept up; it is not to be written to.
        """
        pools = tuple(prefills), tuple(decodes)
        table = self._tables.get(pools)
        if table is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            seconds = [
                [
                    1 / self.rates.bytes_per_s(one.name, other.name)
                    if other.config.takes_over_from(one.config)
                    else inf
                    for other in decodes
                ]
                for one in prefills
            ]
            table = self._tables[pools] = np.array(seconds)
        return table

    async def engine_id(self, worker: Worker) -> str | None:
        """Return the id of a Mooncake prefill engine, as its bootstrap server says; None where that does not answer.

        All requests that need it at the same time ask once.
        """
        engine, asked_at = self._engines.get(worker, ("", 0.0))
        if engine and monotonic() - asked_at < _ENGINE_TTL_S:
            return engine
        if worker not in self._asked:
            self._asked[worker] = spawn(self._ask_bootstrap_server(worker), f"bootstrap server of {worker.name}")
        return await asyncio.shield(self._asked[worker])

    async def _ask_bootstrap_server(self, worker: Worker) -> str | None:
        self._engines.pop(worker, None)
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S), control_client() as client:
                answer = await client.get(f"{bootstrap_url(worker)}/query")
            engine = str(answer.json()[str(worker.config.data_parallel_rank or 0)]["engine_id"])
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, RecursionError):
            return None
        finally:
            del self._asked[worker]
        if worker.row >= 0:
            self._engines[worker] = engine, monotonic()
        return engine

    def _on_change(self, worker: Worker, joined: bool) -> None:
        self._tables.clear()
        if joined:
            self.rates.join(worker.name, worker.config.topology or worker.config.domain)
            return
        self.rates.leave(worker.name)
        self.turns.leave(worker)
        self._engines.pop(worker, None)
        # All that are gone, not this one alone: a request may have ended after its worker left.
        present = {"", *self._registry.workers}
        for of_pair in (self._ttft_s, self._ttfts, self._transfer_s, self._transfers, self._moved_bytes):
            for pair in [pair for pair in of_pair if not present.issuperset(pair)]:
                del of_pair[pair]
        for counted in [counted for counted in self._outcomes if not present.issuperset(counted[:2])]:
            del self._outcomes[counted]
        for name in self._lost_from.keys() - present:
            del self._lost_from[name]


def bootstrap_url(worker: Worker) -> str:
    """Return the URL of a prefill worker's bootstrap server."""
    host = f"[{worker.host}]" if ":" in worker.host else worker.host
    return f"http://{host}:{worker.config.bootstrap_port}"
