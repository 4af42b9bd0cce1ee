"""The engine's own ``/tokenize`` as the source of token ids, for models whose tokenizer is not at hand."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx
import msgspec

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.tokenizer import pack
from gateway.tasks import spawn

TIMEOUT_S: Final = 1.0
_OVERHEAD: Final = 500


class EngineError(Exception):
    """The engine did not tokenize: out of reach, too slow, or it refused the prompt."""


class _Answer(msgspec.Struct):
    tokens: list[int]


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
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S)
        self._decoder = msgspec.json.Decoder(_Answer)

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

    async def _ask(self, url: str, body: bytes) -> bytes | EngineError:
        headers = {"content-type": "application/json"}
        try:
            response = await self._client.post(f"{url}/tokenize", content=body, headers=headers)
            response.raise_for_status()
            packed = pack(self._decoder.decode(response.content).tokens)
        except (httpx.HTTPError, msgspec.DecodeError, OverflowError) as error:
            return EngineError(f"{url}/tokenize: {type(error).__name__}: {error}")
        self._known.put(body, _Ids(body, packed))
        return packed
