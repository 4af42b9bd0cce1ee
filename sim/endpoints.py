"""Every HTTP endpoint of a simulated worker, and how faults get between it and its clients."""

from __future__ import annotations

import asyncio
import base64
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mmh3
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sim.engine_loop import EngineLoop
from sim.faults import Fault, Faults
from sim.handover import FETCH_PATH, HandOvers
from sim.inference import Inference, chat_of
from sim.kv_events import BUFFERED_BATCHES, EventPublisher
from sim.lmcache import WRITE_PATH
from sim.metrics import WorkerMetrics
from sim.protocol import VERSION, ApiError, ChatBody, EmbeddingBody, TokenizeBody, decode, prompts, queue_full
from sim.settings import WorkerSettings
from sim.tokens import Tokenizer

_FAULT_PATH: Final = "/sim/fault"
_WITHOUT_KEY: Final = ("/health", "/metrics", "/load", "/version", "/query", "/sim/")
"""What vLLM answers to everybody, Mooncake's bootstrap server, and what concerns simulated workers only."""
_EMBEDDING_SIZE: Final = 8


@dataclass(slots=True, frozen=True)
class Endpoints:
    """What the endpoints need of a worker. ``begin_fault`` is called with what ``POST /sim/fault`` was given."""

    settings: WorkerSettings
    tokenizer: Tokenizer
    engine: EngineLoop
    inference: Inference
    metrics: WorkerMetrics
    publisher: EventPublisher | None
    hand_overs: HandOvers
    begin_fault: Callable[[Fault], None]

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/v1/chat/completions", self.inference.chat, methods=["POST"]),
            Route("/v1/completions", self.inference.completions, methods=["POST"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/load", self._load),
            Route("/version", self._version),
            Route("/kv_event_sources", self._kv_event_sources),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route(FETCH_PATH, self.hand_overs.serve),
            Route(WRITE_PATH, self.hand_overs.writer.receive, methods=["PUT"]),
            Route("/query", self.hand_overs.query),
            Route(_FAULT_PATH, self._fault, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _client_gone}
        app = Starlette(routes=routes, exception_handlers=handlers)
        return KeyGate(app, self.settings.api_key) if self.settings.api_key else app

    async def _embeddings(self, request: HttpRequest) -> Response:
        raw = await request.body()
        body = decode(raw, EmbeddingBody)
        self.inference.check_model(body.model)
        inputs = [await self.inference.encode(text, len(raw)) for text in prompts(body.input, "input")]
        tokens = sum(map(len, inputs))
        as_base64 = body.encoding_format == "base64"
        vectors = [_vector(ids.tobytes()) for ids in inputs]
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        model = body.model or self.settings.model
        return JSONResponse({"object": "list", "data": data, "model": model, "usage": usage})

    async def _models(self, _: HttpRequest) -> Response:
        base, adapters = self.settings.model, self.settings.adapters
        cards = [self._card(base, None), *(self._card(adapter, base) for adapter in adapters)]
        return JSONResponse({"object": "list", "data": cards})

    def _card(self, model: str, parent: str | None) -> dict[str, Any]:
        root = str(self.settings.tokenizer or self.settings.model) if parent is None else f"/adapters/{model}"
        return {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self.settings.context_tokens if parent is None else None,
        }

    async def _tokenize(self, request: HttpRequest) -> Response:
        raw = await request.body()
        body: ChatBody | TokenizeBody
        if b'"messages"' in raw:
            body = decode(raw, ChatBody)
            tokens = await self.inference.encode(chat_of(body), len(raw))
        else:
            body = decode(raw, TokenizeBody)
            tokens = await self.inference.encode(body.prompt, len(raw))
        self.inference.check_model(body.model)
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self.settings.context_tokens,
                "tokens": tokens.tolist(),
                "token_strs": self.tokenizer.pieces(tokens) if body.return_token_strs else None,
            }
        )

    async def _health(self, _: HttpRequest) -> Response:
        return Response()

    async def _metrics(self, _: HttpRequest) -> Response:
        return Response(self.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _load(self, _: HttpRequest) -> Response:
        return JSONResponse({"server_load": len(self.engine)})

    async def _version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def _kv_event_sources(self, _: HttpRequest) -> Response:
        if self.publisher is None:
            return JSONResponse({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
            "buffer_steps": BUFFERED_BATCHES,
            "topic": self.settings.kv_topic,
        }
        return JSONResponse({"0": source})

    async def _reset_prefix_cache(self, _: HttpRequest) -> Response:
        return JSONResponse({"success": self.engine.worker.reset_cache()})

    async def _fault(self, request: HttpRequest) -> Response:
        fault = decode(await request.body(), Fault)
        return JSONResponse({"kind": fault.kind}, background=BackgroundTask(self._begin, fault))

    async def _begin(self, fault: Fault) -> None:
        self.begin_fault(fault)


class KeyGate:
    """Stands before the application of a worker that demands an API key, and refuses those who do not bring it.

    Args:
        app: what is behind it.
        key: the key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._authorization = f"Bearer {key}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["path"].startswith(_WITHOUT_KEY) or Headers(scope=scope).get("authorization") == self._authorization:
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)


class FaultGate:
    """Stands before the application: lets nothing through during ``hang``, and refuses inference during ``error503``.

    Args:
        app: what is behind it.
        faults: what holds now.
        answering: set except while the worker hangs.
    """

    def __init__(self, app: ASGIApp, faults: Faults, answering: asyncio.Event) -> None:
        self._app = app
        self._faults = faults
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["path"] != _FAULT_PATH:
            await self._answering.wait()
            if scope["method"] == "POST" and scope["path"].startswith("/v1/") and self._faults.meet("error503"):
                await _response(queue_full())(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _vector(ids: bytes) -> array[float]:
    """Return a made-up embedding, the same for the same ids; components lie between -1 and 1."""
    return array("f", (mmh3.hash(ids, component) / 2**31 for component in range(_EMBEDDING_SIZE)))


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")


async def _api_error(_: HttpRequest, error: ApiError) -> Response:
    return _response(error)


async def _http_error(_: HttpRequest, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _client_gone(_: HttpRequest, __: ClientDisconnect) -> Response:
    return Response(status_code=499)  # never sent: nobody is there
