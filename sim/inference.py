"""The endpoints that generate: chat and text completions."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sim.cache import Tokens, hash_blocks
from sim.engine_loop import EngineLoop
from sim.faults import Faults
from sim.generation import Generation, find_stop
from sim.handover import HandOvers
from sim.logprobs import ChatLogprobs, TextLogprobs, asked_logprobs
from sim.metrics import WorkerMetrics
from sim.protocol import (
    CHAT,
    TEXT,
    Answer,
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Shape,
    StreamOptions,
    bad_request,
    decode,
    prompts,
    queue_full,
)
from sim.settings import WorkerSettings
from sim.tokens import Chat, PromptError, Tokenizer
from sim.worker import Request

_OFF_LOOP_BYTES: Final = 4096  # longer bodies are tokenized in a thread
_SALT: Final = re.compile(r"[^@/\\\0]{1,128}")


class Inference:
    """Turns HTTP requests into sequences for the engine.

    Args:
        settings: the worker's.
        tokenizer: its tokenizer.
        engine: where sequences go.
        metrics: told about refused requests.
        faults: refusals and cuts on demand.
        hand_overs: KV from and for other workers.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        tokenizer: Tokenizer,
        engine: EngineLoop,
        metrics: WorkerMetrics,
        faults: Faults,
        hand_overs: HandOvers,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._hand_overs = hand_overs

    async def chat(self, request: HttpRequest) -> Response:
        """``POST /v1/chat/completions``."""
        raw = await request.body()
        body = decode(raw, ChatBody)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        self._check(body)
        tokens = await self.encode(chat_of(body), len(raw))
        return await self._generate(request, CHAT, body, [tokens])

    async def completions(self, request: HttpRequest) -> Response:
        """``POST /v1/completions``."""
        raw = await request.body()
        body = decode(raw, CompletionBody)
        if body.max_tokens is None:
            body.max_tokens = 16  # vLLM's default for text completions
        self._check(body)
        tokens = [await self.encode(prompt, len(raw)) for prompt in prompts(body.prompt, "prompt")]
        return await self._generate(request, TEXT, body, tokens)

    async def encode(self, prompt: Chat | str | Sequence[int], size: int) -> Tokens:
        """Return the ids of a prompt that came in a body of ``size`` bytes.

        Raises:
            ApiError: 400, it cannot become tokens.
        """
        if not isinstance(prompt, Chat | str):
            return self._given_ids(prompt)
        if isinstance(prompt, Chat):
            encode = partial(self._tokenizer.encode_chat, prompt)
        else:
            encode = partial(self._tokenizer.encode_text, prompt)
        try:
            return await asyncio.to_thread(encode) if size > _OFF_LOOP_BYTES else encode()
        except PromptError as error:
            raise bad_request(str(error)) from None

    def _given_ids(self, ids: Sequence[int]) -> Tokens:
        for token in ids:
            if type(token) is not int or not 0 <= token < self._tokenizer.vocab_size:
                raise bad_request(f"Token id {token} is out of vocabulary", "prompt")
        return array("I", ids)

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not served; none named means the base model.

        Raises:
            ApiError: 404.
        """
        if model and model != self._settings.model and model not in self._settings.adapters:
            message = f"The model `{model}` does not exist. Valid aliases: {self._settings.model}."
            raise ApiError(404, "NotFoundError", message, "model")

    def _check(self, body: GenerationBody) -> None:
        self.check_model(body.model)
        if body.n not in (None, 1):
            raise bad_request("n must be 1: a simulated worker generates one choice", "n")
        if body.echo:
            raise bad_request("echo is not supported by a simulated worker", "echo")
        if body.max_tokens is not None and body.max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {body.max_tokens}.", "max_tokens")
        if body.min_tokens < 0:
            raise bad_request(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.", "min_tokens")
        if body.max_tokens is not None and body.min_tokens > body.max_tokens:
            limit = f"max_tokens={body.max_tokens}"
            raise bad_request(f"min_tokens must be less than or equal to {limit}, got {body.min_tokens}.", "min_tokens")
        if body.stream_options is not None and not body.stream:
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
        if not all(body.stops):
            raise bad_request("stop cannot contain an empty string.")
        if body.cache_salt is not None and not _SALT.fullmatch(body.cache_salt):
            raise bad_request("cache_salt must be 1 to 128 characters without @, /, \\ and NUL", "cache_salt")

    async def _generate(
        self, http: HttpRequest, shape: Shape, body: ChatBody | CompletionBody, tokens: list[Tokens]
    ) -> Response:
        settings = self._settings
        tops = asked_logprobs(body, self._tokenizer.vocab_size)
        for prompt in tokens:
            self._check_length(len(prompt))
        if settings.max_requests and len(self._engine) + len(tokens) > settings.max_requests:
            self._metrics.rejected()
            raise queue_full()
        request_id = http.headers.get("x-request-id") or uuid4().hex[:16]
        key = self._hand_overs.key_to_offer(body, f"{shape.id_prefix}{request_id}")
        kept = self._hand_overs.key_to_keep(body, f"{shape.id_prefix}{request_id}")
        if key is not None:
            body.max_tokens = 1
        received = await self._hand_overs.receive(body, tokens[-1])
        wakeup = asyncio.Event()
        generations = [self._sequence(prompt, body, tops, wakeup) for prompt in tokens]
        if received is not None:
            generations[-1].request.remote_tokens = received.tokens
        answer = Answer(
            shape,
            request_id,
            body.model or settings.model,
            generations,
            body.stream_options or StreamOptions(),
            settings.prompt_tokens_details,
            settings.stream_interval,
            received.reported_tokens if received is not None else None,
        )
        for generation in generations:
            self._engine.submit(generation)
        offer = partial(self._offer, key, kept, body, tokens[-1], generations[-1]) if key or kept else None
        return _Generating(self._engine, generations, wakeup, answer, bool(body.stream), self._faults, offer)

    async def _offer(
        self, key: str | None, kept: str | None, body: GenerationBody, prompt: Tokens, generation: Generation
    ) -> dict[str, Any] | None:
        """Offer or write the KV of a prompt, or keep that of an answer, whose last token has not been computed."""
        request = generation.request
        if key is not None:
            if self._settings.pd == "lmcache":
                return self._hand_overs.write(body, prompt, generation.ids[0])
            cached_tokens = max(request.cached_tokens, request.remote_tokens)
            return await self._hand_overs.offer(key, request.prompt_tokens, cached_tokens)
        return await self._hand_overs.keep(kept or "", request.prompt_tokens + request.output_tokens - 1)

    def _check_length(self, length: int) -> None:
        limit = self._settings.context_tokens
        if length == 0:
            raise bad_request("The prompt must not be empty", "prompt")
        if length >= limit:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input "
                "tokens, which leaves no room for output. Please reduce the length of the input prompt.",
                "input_tokens",
            )

    def _sequence(
        self, prompt: Tokens, body: ChatBody | CompletionBody, tops: int | None, wakeup: asyncio.Event
    ) -> Generation:
        settings, tokenizer = self._settings, self._tokenizer
        room = settings.context_tokens - len(prompt)
        length = min(body.max_tokens or max(settings.output_tokens, body.min_tokens), room)
        reason = "length" if body.max_tokens or length == room else "stop"
        scripted = settings.script(prompt) if settings.script is not None else None
        ids = tokenizer.answer(prompt, length) if scripted is None else array("I", scripted[:length])
        pieces = texts = tokenizer.pieces(ids)
        stop = find_stop(pieces, body.stops, bool(body.include_stop_str_in_output), body.min_tokens)
        if stop is not None:
            ids, texts, reason = ids[: stop.tokens], stop.pieces, "stop"
        logprobs = None
        if tops is not None:
            kind = ChatLogprobs if isinstance(body, ChatBody) else TextLogprobs
            logprobs = kind(pieces, tokenizer.others(tops), tops)
        lora = body.model if body.model in settings.adapters else None
        chain = hash_blocks(prompt + ids, settings.block_size, settings.model, lora, body.cache_salt)
        reports = (body.vllm_xargs or {}).get("kv_cache_report_mode") == "full"
        request = Request(chain, len(prompt), len(ids), reports=reports)
        return Generation(request, ids, texts, reason, wakeup, stop.text if stop is not None else None, logprobs)


def chat_of(body: ChatBody) -> Chat:
    """Return the conversation of a body.

    Raises:
        ApiError: 400, fields that exclude each other.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return Chat(
        body.messages,
        body.tools,
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs or {},
    )


class _Generating(Response):
    """The response to a request whose sequences are in the engine; a client that leaves aborts them.

    ``offer`` hands the KV of the prompt to another worker once it is there.
    """

    def __init__(
        self,
        engine: EngineLoop,
        generations: Sequence[Generation],
        wakeup: asyncio.Event,
        answer: Answer,
        stream: bool,
        faults: Faults,
        offer: Callable[[], Awaitable[dict[str, Any] | None]] | None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._generations = generations
        self._wakeup = wakeup
        self._answer = answer
        self._stream = stream
        self._faults = faults
        self._offer = offer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.get_running_loop().create_task(self._abort_when_gone(receive))
        try:
            if self._stream:
                await self._send_stream(scope, send, watcher)
            else:
                await self._send_whole(send)
        finally:
            watcher.cancel()
            self._abort()

    async def _send_whole(self, send: Send) -> None:
        while not self._answer.complete:
            if not await self._more():
                return
        body = self._answer.whole(await self._offer() if self._offer is not None else None)
        await _start(send, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, scope: Scope, send: Send, gone: asyncio.Task[None]) -> None:
        # As in vLLM, the head leaves when the request is queued, long before the first token.
        await _start(send, (b"content-type", b"text/event-stream; charset=utf-8"))
        cut = self._faults.meet("cut")
        while not self._answer.written:
            if not await self._more():
                return
            data = self._answer.chunks() if cut is None else self._answer.chunks(cut.after_tokens)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if cut is not None and self._answer.tokens_written >= cut.after_tokens:
                scope["transport"].abort()
                await gone
                return
        if self._offer is not None:
            await self._offer()
        await send({"type": "http.response.body", "body": self._answer.ending()})

    async def _more(self) -> bool:
        """Wait for more output; False when it was aborted."""
        await self._wakeup.wait()
        self._wakeup.clear()
        return not any(generation.aborted for generation in self._generations)

    async def _abort_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self) -> None:
        for generation in self._generations:
            self._engine.abort(generation)


async def _start(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})
