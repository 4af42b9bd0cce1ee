"""LMCache's coordinator, as operators use it: what its servers hold, pins, prefetches, deletions and quotas.

Follows ``lmcache/v1/mp_coordinator`` of LMCache 0.5.6. Its servers are *instances*; the one whose ``--instance-id`` is
a worker's name serves that worker. They hold chunks in host memory (``l1``) and below (``l2``); of what lies in an
engine's HBM they know nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from gateway.errors import BadRequest, NotPossible, UpstreamError, UpstreamTimeout
from gateway.events.lmcache import LOWER_TIERS, tier_of
from gateway.fleet.polling import control_client
from policies.base import Tier

_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1
_CHUNK_TOKENS: Final = 256  # LMCache's default, where the directory does not say how long its chunks are
_NO_SALT: Final = "_default"  # how the coordinator writes an empty salt in a path

T = TypeVar("T")


class TokenSequence(msgspec.Struct, frozen=True):
    """A prompt as LMCache's keys are made of it: its whole chunks count.

    Attributes:
        model: what the engine calls the model that it has loaded.
        token_ids: from the prompt's first.
        salt: separates caches of equal prompts.
    """

    model: str
    token_ids: list[int]
    salt: str


class Directory(msgspec.Struct):
    """Who holds how much of a prompt, as the coordinator knows it.

    Attributes:
        chunks: whole chunks of the prompt.
        holdings: instance → tokens of its leading run by tier: what it has itself, and what it can read of shared
            stores.
        lies_below: whether any of it lies in ``l2`` anywhere.
    """

    chunks: int
    holdings: dict[str, dict[Tier, int]]
    lies_below: bool

    @property
    def held_tokens(self) -> int:
        """Length of the longest leading run."""
        return max((sum(tiers.values()) for tiers in self.holdings.values()), default=0)


class Pinned(msgspec.Struct):
    """Answer to a pin or an unpin: whole chunks of the prompt, and keys, one per chunk and rank."""

    requested: int
    affected: int


class Prefetched(msgspec.Struct):
    """What came of a prefetch: keys, one per chunk and rank, asked for and found; None while it is not completed."""

    chunks: int
    total_keys: int | None = None
    found_keys: int | None = None


class _Placement(msgspec.Struct):
    instance_id: str
    tier: str
    backend: str = ""
    shared: bool = False


class _Key(msgspec.Struct):
    chunk_hash_hex: str


class _Result(msgspec.Struct):
    key: _Key
    placements: list[_Placement] = []
    token_ids: list[int] = []


class _Lookup(msgspec.Struct):
    chunks: int
    results: list[_Result]


class _Instance(msgspec.Struct):
    instance_id: str
    ip: str
    http_port: int


class _Instances(msgspec.Struct):
    instances: list[_Instance]


class _Submitted(msgspec.Struct):
    status: str
    chunks: int = 0
    request_id: str = ""


class _Progress(msgspec.Struct):
    status: str
    total_keys: int = 0
    found_keys: int = 0


class _Deleted(msgspec.Struct):
    affected: int
    skipped: int


class _Pins(msgspec.Struct):
    total: int


class Coordinator:
    """A client of the coordinator's HTTP API.

    Its methods raise ``BadRequest`` for what it refuses, ``NotPossible`` for what it or an instance does not have, and
    ``UpstreamError`` where it does not answer.

    Args:
        url: its base URL.
        world_size: ranks of each engine, of which LMCache's keys tell.
    """

    def __init__(self, url: str, world_size: int = 1) -> None:
        self.url = url.rstrip("/")
        self._world_size = world_size
        self._client = control_client()

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def instances(self) -> dict[str, str]:
        """Return the servers that are registered: instance → base URL of its HTTP API."""
        found = await self._ask("GET", "/instances", _Instances)
        return {each.instance_id: f"http://{each.ip}:{each.http_port}" for each in found.instances}

    async def lookup(self, sequence: TokenSequence) -> Directory:
        """Return who holds a prompt."""
        registered, found = await asyncio.gather(
            self.instances(), self._ask("POST", "/directory/lookup", _Lookup, self._keys(sequence))
        )
        lies_below = any(place.tier == "l2" for result in found.results for place in result.placements)
        return Directory(found.chunks, _leading_runs(found.results, registered), lies_below)

    async def pin(self, sequence: TokenSequence) -> Pinned:
        """Keep a prompt's chunks from being evicted from ``l2`` for the sake of quotas, on all instances."""
        return await self._ask("POST", "/cache/pins", Pinned, self._keys(sequence))

    async def unpin(self, sequence: TokenSequence) -> Pinned:
        """Take back one pin."""
        return await self._ask("DELETE", "/cache/pins", Pinned, self._keys(sequence))

    async def prefetch(self, instance: str, sequence: TokenSequence, patience_s: float) -> Prefetched:
        """Have an instance load a prompt's chunks from ``l2`` into its memory, and wait for it for ``patience_s``."""
        body = {"instance_id": instance, **self._keys(sequence)}
        job = await self._ask("POST", "/cache/prefetches", _Submitted, body)
        if job.status == "noop":
            return Prefetched(0, 0, 0)
        path = f"/cache/prefetches/{quote(instance, safe='')}/{quote(job.request_id, safe='')}"
        deadline = monotonic() + patience_s
        while monotonic() < deadline:
            progress = await self._ask("GET", path, _Progress)
            if progress.status == "completed":
                return Prefetched(job.chunks, progress.total_keys, progress.found_keys)
            await asyncio.sleep(_POLL_S)
        return Prefetched(job.chunks)

    async def delete(self, instance: str, sequence: TokenSequence, tier: str) -> tuple[int, int]:
        """Delete a prompt's chunks on an instance.

        Args:
            instance: whose.
            sequence: the prompt.
            tier: ``l1``, ``l2`` or ``all``; servers without ``l2`` refuse to delete in it.

        Returns:
            Keys that were deleted, and keys that are locked or pinned and stay.
        """
        body = {"instance_id": instance, "tier": tier, **self._keys(sequence)}
        gone = await self._ask("POST", "/cache/delete", _Deleted, body)
        return gone.affected, gone.skipped

    async def clear(self, server_url: str) -> None:
        """Empty the memory of the server at ``server_url``, but for what is being read or written. ``l2`` stays."""
        await self._ask("POST", "/cache/clear", dict, {"tier": "l1"}, server_url)

    async def stats(self) -> dict[str, Any]:
        """Return what the directory counts, the bytes of each instance, the quotas of each salt, and the pins."""
        parts = {"directory": "/directory/stats", "usage": "/instances/usage", "quotas": "/quota"}
        answers = await asyncio.gather(*(self._ask("GET", path, dict[str, Any]) for path in parts.values()))
        pins = await self._ask("GET", "/cache/pins?limit=1", _Pins)
        return {**dict(zip(parts, answers, strict=True)), "pinned_keys": pins.total}

    async def set_quota(self, salt: str, limit_gb: float | None) -> dict[str, Any]:
        """Bound what one salt may hold in ``l2``, in GiB; None takes the bound away."""
        path = f"/quota/{quote(salt, safe='') or _NO_SALT}"
        if limit_gb is None:
            return await self._ask("DELETE", path, dict[str, Any])
        return await self._ask("PUT", path, dict[str, Any], {"limit_gb": limit_gb})

    def _keys(self, sequence: TokenSequence) -> dict[str, Any]:
        return {
            "model_name": sequence.model,
            "world_size": self._world_size,
            "token_ids": sequence.token_ids,
            "cache_salt": sequence.salt,
        }

    async def _ask(
        self, method: str, path: str, shape: type[T], body: Mapping[str, Any] | None = None, url: str = ""
    ) -> T:
        """Return the answer of the coordinator, or of what is at ``url``."""
        url, content = (url or self.url) + path, None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await self._client.request(method, url, content=content, headers=headers)
            if answer.status_code < 400:
                return msgspec.json.decode(answer.content, type=shape)
        except TimeoutError:
            raise UpstreamTimeout(f"LMCache does not answer {method} {url} within {_TIMEOUT_S:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            why = str(error) or type(error).__name__
            message = f"LMCache cannot be reached at {url} ({why}); see cache_control.coordinator."
            raise UpstreamError(message) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamError(f"What answers {method} {url} is no LMCache coordinator: {error}.") from None
        detail = f"LMCache answers {answer.status_code} to {method} {url}: {answer.text[:300]}"
        if answer.status_code in (400, 422):
            raise BadRequest(detail)
        raise (NotPossible if answer.status_code in (404, 405, 501) else UpstreamError)(detail)


def _leading_runs(results: Iterable[_Result], registered: Iterable[str]) -> dict[str, dict[Tier, int]]:
    """Return the tokens of each instance's leading run by tier.

    A chunk is several keys, one per rank; all are needed, so the slowest of them decides about its tier.
    """
    chunks: dict[str, list[dict[str, Tier]]] = {}
    names = dict.fromkeys(registered)
    chunk_tokens = 0
    for result in results:
        fastest: dict[str, Tier] = {}
        for place in result.placements:
            name, tier = "" if place.shared else place.instance_id, tier_of(place.tier, place.backend, place.shared)
            fastest[name] = min(tier, fastest.get(name, tier))
            names[place.instance_id] = None
        chunks.setdefault(result.key.chunk_hash_hex, []).append(fastest)
        chunk_tokens = max(chunk_tokens, len(result.token_ids))
    return {name: _leading_run(name, chunks.values(), chunk_tokens or _CHUNK_TOKENS) for name in names}


def _leading_run(name: str, chunks: Iterable[list[dict[str, Tier]]], chunk_tokens: int) -> dict[Tier, int]:
    run = dict.fromkeys(LOWER_TIERS, 0)
    for keys in chunks:
        tiers = [min((key[who] for who in (name, "") if who in key), default=None) for key in keys]
        if None in tiers:
            break
        run[max(tier for tier in tiers if tier is not None)] += chunk_tokens
    return run
