"""What ``kvway cache`` does, over kvway's own index, LMCache's coordinator where there is one, and the engines.

Where a backend cannot do what is asked for, ``NotPossible`` says so; docs/cache-control.md has the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from gateway.caches.coordinator import Coordinator, TokenSequence
from gateway.caches.engines import reset_prefix_cache
from gateway.caches.warm_up import WarmUps
from gateway.config import CacheControlConfig
from gateway.errors import BadRequest, GatewayError, NotFound, NotPossible, UnknownModel
from gateway.events.feeds import EventFeeds
from gateway.fleet.polling import control_client
from gateway.fleet.registry import Candidates, Worker
from gateway.relay.naming import only_model
from gateway.relay.plan import prompt_path
from gateway.relay.services import Services
from gateway.replication.seen import SeenPrompt
from policies.base import Residency, Tier
from policies.chunks import ChunkHasher

By = Literal["auto", "coordinator", "warm-up"]
"""How a prefetch is done: ``auto`` is by the coordinator where it has the prompt, else by a warm-up."""

_PREFETCH_S: Final = 120.0
_NO_COORDINATOR: Final = "no LMCache coordinator is configured (cache_control.coordinator)"


class _Asked(msgspec.Struct):
    """A prompt that an operator asks about."""

    seen: SeenPrompt
    candidates: Candidates

    @property
    def model(self) -> str:
        return self.seen.model


class CacheControl:
    """The verbs.

    Args:
        config: its section of the configuration.
        services: the other rooms.
        feeds: where the index learns what workers hold.
        hasher: the same as for prompts.
    """

    def __init__(self, config: CacheControlConfig, services: Services, feeds: EventFeeds, hasher: ChunkHasher) -> None:
        self._services = services
        self._feeds = feeds
        self._hasher = hasher
        self._client = control_client()
        self.coordinator = Coordinator(config.coordinator, config.world_size) if config.coordinator else None
        self._warm_ups = WarmUps(services, hasher, config.warm_up_tokens_per_min)
        self._warm_ups.expose(services.observer)

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()
        if self.coordinator is not None:
            await self.coordinator.close()

    async def lookup(self, path: str, body: bytes) -> dict[str, Any]:
        """Return which worker holds how many of a prompt's leading tokens in which tier; nothing is sent or counted.

        Returns:
            ``model``, ``prompt_tokens``, ``exact``, ``chunk_tokens``, ``workers`` (from kvway's index, one row each)
            and ``coordinator``: None, or its ``instances``, or its ``problem``.
        """
        asked = await self._read(path, body)
        workers = [worker for worker in self._services.registry.workers.values() if asked.model in worker.models]
        residency = await self._residency(asked, workers)
        rows = [
            {"worker": worker.name, "state": worker.state, "source": self._source(worker), **_by_tier(tiers)}
            for worker, tiers in zip(workers, residency.tiers(), strict=True)
        ]
        return {
            "model": asked.model,
            "prompt_tokens": asked.seen.prompt.tokens,
            "exact": asked.seen.prompt.exact,
            "chunk_tokens": self._hasher.chunk_tokens,
            "workers": rows,
            "coordinator": await self._directory(asked),
        }

    async def pin(self, path: str, body: bytes, pinned: bool) -> dict[str, Any]:
        """Pin a prompt in LMCache, or take back one pin.

        Returns:
            ``chunks`` of the prompt, the ``keys`` that are pinned, and ``held_tokens``: how much of it any instance
            holds now.
        """
        if self.coordinator is None:
            raise NotPossible(
                f"Engines cannot pin: vLLM and SGLang evict what was used the longest time ago, and {_NO_COORDINATOR}. "
                f"`kvway cache prefetch` makes a prefix the most recently used one again."
            )
        asked = await self._read(path, body)
        sequence = self._sequence(asked)
        done = await (self.coordinator.pin if pinned else self.coordinator.unpin)(sequence)
        held = await self.coordinator.lookup(sequence)
        return {
            "status": "pinned" if pinned else "unpinned",
            "chunks": done.requested,
            "keys": done.affected,
            "held_tokens": held.held_tokens,
        }

    async def prefetch(self, path: str, body: bytes, name: str, by: By = "auto") -> dict[str, Any]:
        """Bring a prompt to a worker.

        Returns:
            ``by``, and what came of it: see ``_fetch`` and ``WarmUps.send``.
        """
        asked = await self._read(path, body)
        worker = self._worker(name, asked.model)
        if by == "warm-up" or (by == "auto" and self.coordinator is None):
            return await self._warm_up(asked, worker)
        try:
            fetched = await self._fetch(asked, worker)
            if by == "coordinator" or fetched["found_keys"] != 0:
                return fetched
            problem = "LMCache has nothing of this prompt below host memory."
        except GatewayError as error:
            if by == "coordinator":
                raise
            problem = error.message
        return await self._warm_up(asked, worker) | {"coordinator_problem": problem}

    async def move(self, path: str, body: bytes, source: str, target: str) -> dict[str, Any]:
        """Bring a prompt to another worker's LMCache server, and only if it has come whole, delete it on the first.

        Returns:
            What ``_fetch`` returns for the target, with ``status`` (``moved`` or ``copied in part``) and
            ``deleted_keys`` of the source's host memory.
        """
        if self.coordinator is None:
            raise NotPossible(
                f"Engines cannot be told to move KV from one to another, and {_NO_COORDINATOR}. "
                f"`kvway cache prefetch --worker {target}` computes the prompt there."
            )
        if source == target:
            raise BadRequest(f"{target} cannot be both ends of a move: name another worker as the target.")
        asked = await self._read(path, body)
        sequence = self._sequence(asked)
        self._worker(source, asked.model)
        await self._check_instance(source)
        fetched = await self._fetch(asked, self._worker(target, asked.model))
        if not fetched["found_keys"] or fetched["found_keys"] != fetched["total_keys"]:
            return fetched | {"status": "copied in part", "deleted_keys": 0}
        deleted, _ = await self.coordinator.delete(source, sequence, "l1")
        return fetched | {"status": "moved", "deleted_keys": deleted}

    async def clear(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Empty the caches of workers, of all of them where none is named: their engines' and their LMCache servers'.

        Returns:
            Of each worker: ``worker``, ``engine``, ``lmcache`` and ``index``: ``cleared``, or why not; None where there
            is nothing of the kind.
        """
        registry = self._services.registry
        workers = [self._worker(name) for name in names] or list(registry.workers.values())
        servers: dict[str, str] | GatewayError = {}
        if self.coordinator is not None:
            try:
                servers = await self.coordinator.instances()
            except GatewayError as error:
                servers = error
        return list(await asyncio.gather(*(self._clear(worker, servers) for worker in workers)))

    async def _clear(self, worker: Worker, servers: dict[str, str] | GatewayError) -> dict[str, Any]:
        row: dict[str, Any] = {"worker": worker.name, "engine": "cleared", "lmcache": None, "index": None}
        # LMCache first: an engine that is emptied before would fetch from it what is still there.
        if isinstance(servers, GatewayError):
            row["lmcache"] = servers.message
        elif self.coordinator is not None and worker.name in servers:
            try:
                await self.coordinator.clear(servers[worker.name])
                row["lmcache"] = "cleared"
            except GatewayError as error:
                row["lmcache"] = error.message
        # Data-parallel ranks behind one URL are workers of their own, and are all emptied at once.
        alike = [other for other in self._services.registry.workers.values() if other.config.url == worker.config.url]
        clears = [self._feeds.clears(other) for other in alike]
        try:
            await reset_prefix_cache(self._client, worker)
        except GatewayError as error:
            row["engine"] = error.message
            return row
        followed = [await self._feeds.cleared(*each) for each in zip(alike, clears, strict=True)]
        for other in alike:
            self._services.approximate.forget(other.slot)
        row["index"] = "cleared" if all(followed) else "left to the replica that follows the worker's events"
        return row

    async def delete(self, path: str, body: bytes, names: Sequence[str]) -> list[dict[str, Any]]:
        """Delete one prompt from the LMCache servers of workers, of all of them where none is named.

        Returns:
            Of each worker: ``worker``, and ``deleted_keys`` and ``kept_keys`` (locked or pinned), or its ``problem``.
        """
        if self.coordinator is None:
            raise NotPossible(
                f"Engines forget all prompts or none, and {_NO_COORDINATOR}. Without a prompt, `kvway cache clear` "
                f"empties the whole cache of a worker."
            )
        sequence = self._sequence(await self._read(path, body))
        tier = "all" if (await self.coordinator.lookup(sequence)).lies_below else "l1"
        rows = []
        for name in [self._worker(name).name for name in names] or await self.coordinator.instances():
            try:
                deleted, kept = await self.coordinator.delete(name, sequence, tier)
                rows.append({"worker": name, "deleted_keys": deleted, "kept_keys": kept})
            except GatewayError as error:
                rows.append({"worker": name, "problem": error.message})
        return rows

    async def set_quota(self, salt: str, limit_gb: float | None) -> dict[str, Any]:
        """Bound what the prompts of one ``cache_salt`` may hold below LMCache's host memory, in GiB; None: no bound."""
        if self.coordinator is None:
            raise NotPossible(f"Engines know no quotas, and {_NO_COORDINATOR}.")
        return await self.coordinator.set_quota(salt, limit_gb)

    async def _read(self, path: str, body: bytes) -> _Asked:
        path = prompt_path(path, body)
        services = self._services
        request = await services.prompts.read(path, body)
        model = request.model or only_model(services.registry)
        candidates = services.registry.candidates(model)
        prompt = await services.prompts.prompt(request, candidates)
        return _Asked(SeenPrompt(model, request.cache_salt, path, body, prompt), candidates)

    async def _residency(self, asked: _Asked, workers: Sequence[Worker]) -> Residency:
        chunks = asked.seen.prompt.chunks
        if not chunks:
            return Residency.none(len(workers))
        slots = [worker.slot for worker in workers]
        return await self._services.index.residency(chunks, slots, self._hasher.chunk_tokens)

    async def _directory(self, asked: _Asked) -> dict[str, Any] | None:
        if self.coordinator is None:
            return None
        try:
            found = await self.coordinator.lookup(self._sequence(asked))
        except GatewayError as error:
            return {"problem": error.message}
        rows = []
        for name, tiers in found.holdings.items():
            rows.append({"instance": name, **_by_tier([tiers.get(tier, 0) for tier in Tier])})
        return {"chunks": found.chunks, "instances": rows}

    async def _fetch(self, asked: _Asked, worker: Worker) -> dict[str, Any]:
        """Prefetch by the coordinator: ``chunks``, and keys (per chunk and rank) in all and found; None: not yet."""
        if self.coordinator is None:
            raise NotPossible(f"Nobody can load KV for {worker.name}: {_NO_COORDINATOR}.")
        await self._check_instance(worker.name)
        done = await self.coordinator.prefetch(worker.name, self._sequence(asked), _PREFETCH_S)
        return {"by": "coordinator", "worker": worker.name, **msgspec.structs.asdict(done)}

    async def _warm_up(self, asked: _Asked, worker: Worker) -> dict[str, Any]:
        candidates, salt = asked.candidates, asked.seen.cache_salt
        residency = await self._residency(asked, [worker])
        root = self._hasher.root(candidates.model, candidates.lora, salt)
        done = await self._warm_ups.send(worker, asked.seen, root, residency.hit(0))
        return {"by": "warm-up", "worker": worker.name, **done}

    async def _check_instance(self, name: str) -> None:
        assert self.coordinator is not None
        instances = await self.coordinator.instances()
        if name not in instances:
            known = ", ".join(instances) or "none"
            raise NotPossible(
                f"No LMCache server of {name} is registered with the coordinator: start it with --instance-id {name}. "
                f"Registered: {known}."
            )

    def _sequence(self, asked: _Asked) -> TokenSequence:
        """Return a prompt as LMCache knows it.

        Raises:
            NotPossible: its tokens are not known here, or LMCache cannot tell it from another model's.
        """
        candidates, seen = asked.candidates, asked.seen
        if candidates.lora is not None:
            raise NotPossible(f"LMCache's keys do not tell adapters apart, and {candidates.lora!r} is one.")
        if not seen.prompt.exact:
            raise NotPossible(
                f"The token ids of this prompt are not known here, and LMCache's keys are made of them: set "
                f"models.{candidates.model}.tokenizer, or source: engine."
            )
        cards = [card for worker in candidates.workers for card in worker.model_cards]
        roots = (card.get("root") for card in cards if card.get("id") == candidates.model)
        loaded = next((root for root in roots if isinstance(root, str)), candidates.model)
        ids: list[int] = np.frombuffer(seen.prompt.ids, "<u4").tolist()
        return TokenSequence(loaded, ids, seen.cache_salt or "")

    def _worker(self, name: str, model: str | None = None) -> Worker:
        workers = self._services.registry.workers
        if name not in workers:
            raise NotFound(f"There is no worker {name!r}; workers: {', '.join(workers) or 'none'}.")
        if model is not None and model not in workers[name].models:
            served = ", ".join(workers[name].models) or "nothing yet"
            raise UnknownModel(f"{name} does not serve {model!r}; it serves {served}.", param="model")
        return workers[name]

    def _source(self, worker: Worker) -> str:
        """Return how the index knows what a worker holds."""
        return "events" if worker.config.kv_events is not None else "model"


def _by_tier(tokens: Sequence[int]) -> dict[str, int]:
    named = {f"{tier.name.lower()}_tokens": held for tier, held in zip(Tier, tokens, strict=True)}
    return {"hit_tokens": sum(tokens), **named}
