"""The engine as a source of token ids: for models whose tokenizer is not at hand, and to check those made here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

import httpx
import msgspec
from mmh3 import mmh3_x64_128_digest

from gateway.config_workers import WorkerConfig
from gateway.fleet.credentials import credentials
from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.tokenizer import pack
from gateway.tasks import spawn
from policies.chunks import Medium, media_extra

TIMEOUT_S: Final = 1.0
RENDER_TIMEOUT_S: Final = 10.0
"""For what no request waits for."""

# vLLM forbids rendering unless it was started with --enable-scale-out
_NOT_RENDERED: Final = frozenset({403, 404, 405, 501})
_ASK_AGAIN_S: Final = 60.0  # a worker that does not render may be started anew with the flag
_OVERHEAD: Final = 500

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class EngineError(Exception):
    """The engine did not tokenize: out of reach, too slow, or it refused the prompt."""


class NotRenderedError(EngineError):
    """The engine does not render requests."""


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Answer(msgspec.Struct):
    tokens: list[int] | None = None  # of /tokenize
    token_ids: list[int] | None = None  # of /render
    features: _Features | None = None


class Placeholder(NamedTuple):
    """An image, audio or video in a prompt.

    Attributes:
        offset: of its first placeholder token.
        length: in tokens.
        name: the engine's hash of it, as in its KV events.
    """

    offset: int
    length: int
    name: bytes


class EnginePrompt(Entry):
    """A prompt as an engine makes it.

    Attributes:
        packed: token ids, little-endian u32.
        media: in the order of their offsets.
    """

    __slots__ = ("media", "packed")

    def __init__(self, packed: bytes, media: Sequence[Placeholder] = ()) -> None:
        super().__init__(len(packed) + 200 * len(media) + _OVERHEAD)
        self.packed = packed
        self.media = media


class EngineTokenizer:
    """Asks workers for token ids, and remembers the answers.

    Args:
        max_bytes: bound on remembered prompts and ids.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteCache[bytes, EnginePrompt] = ByteCache(max_bytes)
        self._asked: dict[bytes, asyncio.Task[EnginePrompt | EngineError]] = {}
        self._not_rendering: dict[str, float] = {}  # until when that is taken for granted
        self._client = httpx.AsyncClient()
        self._decoder = msgspec.json.Decoder(_Answer | list[_Answer])

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def tokenize(self, worker: WorkerConfig, payload: dict[str, Any]) -> EnginePrompt:
        """Return the prompt that a worker makes of a chat or a text.

        Args:
            worker: one that serves the model.
            payload: body of a ``/tokenize`` request.

        Raises:
            EngineError: no answer, or none that can be used.
        """
        return await self._ask(worker, "/tokenize", msgspec.json.encode(payload))

    async def render(self, worker: WorkerConfig, path: str, body: bytes) -> EnginePrompt:
        """Return the prompt that a worker makes of a request, without running it.

        Args:
            worker: one that serves the model.
            path: of the request.
            body: of the request; vLLM renders it as it is, at ``<path>/render``.

        Raises:
            NotRenderedError: the worker has no such endpoint.
            EngineError: no answer, or none that can be used.
        """
        now, url = monotonic(), worker.url
        if self._not_rendering.get(url, 0.0) > now:
            raise NotRenderedError(f"{url} does not render requests")
        try:
            return await self._ask(worker, f"{path}/render", body)
        except NotRenderedError:
            self._not_rendering = {known: until for known, until in self._not_rendering.items() if until > now}
            self._not_rendering[url] = now + _ASK_AGAIN_S
            raise

    async def _ask(self, worker: WorkerConfig, path: str, body: bytes) -> EnginePrompt:
        """Ask what was not asked yet; all who ask the same get the same answer."""
        key = mmh3_x64_128_digest(body) + path.encode()
        known = self._known.get(key)
        if known is not None:
            return known
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = spawn(self._answer(worker, path, body, key), "ask the engine for a prompt")
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        answer = await asyncio.shield(task)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def rendered(
        self, worker: WorkerConfig, path: str, body: bytes, payload: Callable[[], dict[str, Any]]
    ) -> bytes:
        """Return the packed ids that a worker makes of a request, without running it, and remember nothing.

        Args:
            worker: one that serves the model.
            path: of the request.
            body: of the request; vLLM renders it as it is, at ``<path>/render``.
            payload: makes the body of a ``/tokenize`` request, for workers that do not render.

        Raises:
            EngineError: no answer, or none that can be used.
        """
        try:
            response = await self._post(worker, f"{path}/render", body, RENDER_TIMEOUT_S)
            if response.status_code not in _NOT_RENDERED:
                return self._read(response).packed
            body = msgspec.json.encode(payload())
            return self._read(await self._post(worker, "/tokenize", body, RENDER_TIMEOUT_S)).packed
        except (httpx.HTTPError, ValueError, OverflowError, IndexError) as error:
            raise EngineError(f"{worker.url}: {type(error).__name__}: {error}") from None

    async def _answer(self, worker: WorkerConfig, path: str, body: bytes, key: bytes) -> EnginePrompt | EngineError:
        url = worker.url + path
        try:
            response = await self._post(worker, path, body, TIMEOUT_S)
            if response.status_code in _NOT_RENDERED:
                return NotRenderedError(f"{url}: status {response.status_code}")
            prompt = self._read(response)
        except (httpx.HTTPError, ValueError, OverflowError, IndexError) as error:
            return EngineError(f"{url}: {type(error).__name__}: {error}")
        if not prompt.media:  # what lies behind a URL may change
            self._known.put(key, prompt)
        return prompt

    async def _post(self, worker: WorkerConfig, path: str, body: bytes, timeout_s: float) -> httpx.Response:
        headers = {"content-type": "application/json", **credentials(worker)}
        return await self._client.post(worker.url + path, content=body, headers=headers, timeout=timeout_s)

    def _read(self, response: httpx.Response) -> EnginePrompt:
        response.raise_for_status()
        answer = self._decoder.decode(response.content)
        if isinstance(answer, list):  # one for each prompt
            answer = answer[0]
        ids = answer.token_ids if answer.tokens is None else answer.tokens
        if ids is None:
            raise ValueError("an answer without token ids")
        return EnginePrompt(pack(ids), _media(answer.features))


def without_tensors(body: bytes) -> bytes:
    """Return the body of a request to render such that the answer names media without containing them."""
    try:
        fields = _decode_fields(body)
    except msgspec.DecodeError:  # some JSON is read only by the parser that engines use
        return body
    return msgspec.json.encode({**fields, "mm_payload": "none"})


def chunk_extras(media: Iterable[Placeholder], chunk_tokens: int) -> dict[int, bytes]:
    """Return what media add to the chunks that they reach into, by number; the assembler makes the same of events."""
    found: dict[int, list[Medium]] = {}
    for place in media:
        last = place.offset + place.length - 1
        for number in range(place.offset // chunk_tokens, last // chunk_tokens + 1):
            found.setdefault(number, []).append((place.name, place.offset - number * chunk_tokens))
    return {number: media_extra(in_chunk) for number, in_chunk in found.items()}


def _media(features: _Features | None) -> list[Placeholder]:
    if features is None:
        return []
    media = [
        Placeholder(place.offset, place.length, name.encode())
        for modality, names in features.mm_hashes.items()
        for name, place in zip(names, features.mm_placeholders.get(modality, ()), strict=True)
    ]
    return sorted(media)
