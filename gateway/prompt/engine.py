"""The engine as a source of token ids: for models whose tokenizer is not at hand, and to check those made here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httpx
import msgspec

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.tokenizer import pack
from gateway.tasks import spawn

TIMEOUT_S: Final = 1.0
RENDER_TIMEOUT_S: Final = 10.0
"""For what no request waits for."""

_NOT_THERE: Final = frozenset({404, 405, 501})
_OVERHEAD: Final = 500


class EngineError(Exception):
    """The engine did not tokenize: out of reach, too slow, or it refused the prompt."""


class _Answer(msgspec.Struct):
    tokens: list[int]


class _Rendered(msgspec.Struct):
    token_ids: list[int]


class _Ids(Entry):
    __slots__ = ("packed",)

    def __init__(self, payload: bytes, packed: bytes) -> None:
        super().__init__(len(payload) + len(packed) + _OVERHEAD)
        self.packed = packed


class EngineTokenizer:
    """Asks workers for token ids, and remembers the answers.

    Args:
        max_bytes: bound on remembered prompts and ids.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteCache[bytes, _Ids] = ByteCache(max_bytes)
        self._asked: dict[bytes, asyncio.Task[bytes | EngineError]] = {}
        self._client = httpx.AsyncClient()
        self._decoder = msgspec.json.Decoder(_Answer)
        self._render_decoder = msgspec.json.Decoder(_Rendered | list[_Rendered])

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def ids(self, url: str, payload: dict[str, Any]) -> bytes:
        """Return packed ids.

        Args:
            url: base URL of a worker that serves the model.
            payload: body of a ``/tokenize`` request.

        Raises:
            EngineError: no answer, or none that can be used.
        """
        body = msgspec.json.encode(payload)
        known = self._known.get(body)
        if known is not None:
            return known.packed
        task = self._asked.get(body)
        if task is None:
            task = self._asked[body] = spawn(self._ask(url, body), "ask the engine to tokenize")
            task.add_done_callback(lambda _: self._asked.pop(body, None))
        answer = await asyncio.shield(task)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def rendered(self, url: str, path: str, body: bytes, payload: Callable[[], dict[str, Any]]) -> bytes:
        """Return the packed ids that a worker makes of a request, without running it, and remember nothing.

        Args:
            url: base URL of a worker that serves the model.
            path: of the request.
            body: of the request; vLLM renders it as it is, at ``<path>/render``.
            payload: makes the body of a ``/tokenize`` request, for workers that do not render.

        Raises:
            EngineError: no answer, or none that can be used.
        """
        try:
            response = await self._post(f"{url}{path}/render", body, RENDER_TIMEOUT_S)
            if response.status_code not in _NOT_THERE:
                response.raise_for_status()
                answer = self._render_decoder.decode(response.content)
                return pack((answer[0] if isinstance(answer, list) else answer).token_ids)
            body = msgspec.json.encode(payload())
            return self._read(await self._post(f"{url}/tokenize", body, RENDER_TIMEOUT_S))
        except (httpx.HTTPError, msgspec.DecodeError, OverflowError, IndexError) as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}") from None

    async def _ask(self, url: str, body: bytes) -> bytes | EngineError:
        try:
            packed = self._read(await self._post(f"{url}/tokenize", body, TIMEOUT_S))
        except (httpx.HTTPError, msgspec.DecodeError, OverflowError) as error:
            return EngineError(f"{url}/tokenize: {type(error).__name__}: {error}")
        self._known.put(body, _Ids(body, packed))
        return packed

    async def _post(self, url: str, body: bytes, timeout_s: float) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await self._client.post(url, content=body, headers=headers, timeout=timeout_s)

    def _read(self, response: httpx.Response) -> bytes:
        response.raise_for_status()
        return pack(self._decoder.decode(response.content).tokens)
