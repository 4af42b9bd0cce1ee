"""What engines let operators do to their caches: empty them, and say how often they were hit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final

import httpx
import msgspec

from gateway.errors import NotPossible, Saturated, UpstreamError, UpstreamTimeout
from gateway.fleet.credentials import credentials
from gateway.fleet.polling import FetchFailed, fetch
from gateway.fleet.registry import Worker

_TIMEOUT_S: Final = 10.0
_RESETS: Final = ("/reset_prefix_cache", "/flush_cache")
"""Of vLLM, in developer mode only, and of SGLang."""

_HIT_RATES: Final[Mapping[str, tuple[bytes, bytes]]] = {
    "engine": (b"vllm:prefix_cache_hits_total", b"vllm:prefix_cache_queries_total"),
    "below_hbm": (b"vllm:external_prefix_cache_hits_total", b"vllm:external_prefix_cache_queries_total"),
}
_SGLANG_HIT_RATE: Final = b"sglang:cache_hit_rate"


class _Reset(msgspec.Struct):
    success: bool = True


async def reset_prefix_cache(client: httpx.AsyncClient, worker: Worker) -> None:
    """Have a worker's engine forget all KV that it holds.

    Raises:
        NotPossible: its engine does not offer that.
        Saturated: requests are running on it, and their blocks cannot go.
        UpstreamError: no answer, or none that says what happened.
    """
    for path in _RESETS:
        status, body = await _post(client, worker, path)
        if status not in (404, 405):
            break
    else:
        raise NotPossible(
            f"The engine of {worker.name} cannot be told to empty its cache: vLLM can with VLLM_SERVER_DEV_MODE=1 in "
            f"its environment, SGLang always."
        )
    if status == 400 or (status == 200 and not _succeeded(body)):
        raise Saturated(f"The engine of {worker.name} has requests whose blocks it keeps; drain it, or ask again.")
    if status != 200:
        raise UpstreamError(f"The engine of {worker.name} answers {status} to POST {path}.")


async def hit_rates(client: httpx.AsyncClient, worker: Worker) -> dict[str, float]:
    """Return the shares of looked-up tokens that the engine found since its start: ``engine`` and ``below_hbm``.

    What it does not say is left out.
    """
    try:
        _, text = await fetch(client, worker, "/metrics", _TIMEOUT_S)
    except FetchFailed:
        return {}
    rates = {name: _sum(text, hits) / asked for name, (hits, of) in _HIT_RATES.items() if (asked := _sum(text, of))}
    if _SGLANG_HIT_RATE in text:
        rates["engine"] = _sum(text, _SGLANG_HIT_RATE)
    return rates


async def _post(client: httpx.AsyncClient, worker: Worker, path: str) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await client.post(worker.config.url + path, headers=credentials(worker.config))
        return answer.status_code, answer.content
    except TimeoutError:
        raise UpstreamTimeout(f"{worker.name} does not answer POST {path} within {_TIMEOUT_S:g} s.") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise UpstreamError(f"{worker.name} cannot be reached ({error or type(error).__name__}).") from None


def _succeeded(body: bytes) -> bool:
    """Return what a reset says of itself; older vLLMs, and SGLang, only that it was done."""
    try:
        return msgspec.json.decode(body, type=_Reset).success
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def _sum(text: bytes, name: bytes) -> float:
    """Return the sum of a metric's samples."""
    samples = re.findall(rb"^" + name + rb"(?:\{[^\n]*\})? +([0-9.eE+-]+)", text, re.MULTILINE)
    return sum(map(float, samples))
