"""The OpenAI API as vLLM 0.32 shapes it: bodies in, JSON and server-sent events out."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from sim.generation import Generation

VERSION: Final = "0.32.0"
FINGERPRINT: Final = f"vllm-{VERSION}-sim"
DONE: Final = b"data: [DONE]\n\n"

_json = msgspec.json.encode


class ApiError(Exception):
    """An answer that is an error, in vLLM's form."""

    def __init__(self, status: int, type_: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type_
        self.param = param

    def body(self) -> bytes:
        """Return it as JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.status}
        return _json({"error": error})


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return vLLM's answer to a request it cannot serve."""
    return ApiError(400, "BadRequestError", message, param)


def queue_full() -> ApiError:
    """Return vLLM's answer when it has as many requests as it may."""
    busy = "The engine is currently busy and cannot accept new requests."
    return ApiError(503, "Service Unavailable", f"{busy} Please try again later or on a different instance.")


class StreamOptions(msgspec.Struct):
    """What a stream says about usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(msgspec.Struct, kw_only=True):
    """What chat and text completions share. Fields that make no difference here are not read."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = False
    n: int | None = 1
    echo: bool | None = False
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``; also ``POST /tokenize`` of a conversation."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class CompletionBody(GenerationBody, kw_only=True):
    """``POST /v1/completions``: one text, several, one list of token ids, or several."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct):
    """``POST /tokenize`` of a text."""

    prompt: str
    model: str | None = None
    return_token_strs: bool | None = False


class EmbeddingBody(msgspec.Struct):
    """``POST /v1/embeddings``."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = "float"


B = TypeVar("B", bound=msgspec.Struct)


def decode(body: bytes, kind: type[B]) -> B:
    """Read a request body.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "Bad Request", f"1 validation error:\n  {error}") from None


def prompts(value: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Return the prompts of a completion body, each a text or token ids.

    Raises:
        ApiError: 400, nothing in it or a mixture.
    """
    if isinstance(value, str):
        return [value]
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]  # type: ignore[list-item]
    if len(kinds) != 1:
        raise bad_request(f"{field} must be a text, a list of texts, token ids or a list of token ids", field)
    return value  # type: ignore[return-value]


@dataclass(slots=True, frozen=True)
class Shape:
    """How a kind of completion is written.

    Attributes:
        id_prefix: of its id.
        object: what it is called.
        chunk_object: what a chunk of its stream is called.
        opening: what stands before the text of a streamed choice.
        closing: what stands after it, around log probabilities and ``going_on`` or how the choice ends.
        going_on: how a choice ends that does not end yet.
    """

    id_prefix: str
    object: str
    chunk_object: str
    opening: bytes
    closing: bytes
    going_on: bytes


CHAT: Final = Shape(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    b'"delta":{"content":',
    b'},"logprobs":%b,"finish_reason":%b,"token_ids":null}]',
    b"null",
)
TEXT: Final = Shape(
    "cmpl-",
    "text_completion",
    "text_completion",
    b'"text":',
    b',"logprobs":%b,"finish_reason":%b,"prompt_token_ids":null,"token_ids":null}]',
    b'null,"stop_reason":null',
)


class Answer:
    """Writes the response to one request, whole or in chunks.

    Args:
        shape: kind of completion.
        request_id: what the client called the request, or a random id.
        model: the model as the client named it.
        generations: one per prompt.
        options: what a stream says about usage.
        details: whether usage has ``prompt_tokens_details``.
        interval: tokens per chunk, after the first.
        cached_tokens: what usage calls cached; None: what the worker had cached.
    """

    def __init__(
        self,
        shape: Shape,
        request_id: str,
        model: str,
        generations: Sequence[Generation],
        options: StreamOptions,
        details: bool,
        interval: int,
        cached_tokens: int | None = None,
    ) -> None:
        self._shape = shape
        self._head = {"id": f"{shape.id_prefix}{request_id}", "object": shape.object, "created": int(time.time())}
        self._head["model"] = model
        self._generations = generations
        self._options = options
        self._details = details
        self._interval = interval
        self._cached_tokens = cached_tokens
        self._written = [0] * len(generations)
        chunk_head = _json(self._head | {"object": shape.chunk_object})[:-1]
        self._chunk_head = b"data: " + chunk_head + b',"choices":['

    @property
    def tokens_written(self) -> int:
        """Output tokens in the chunks so far."""
        return sum(self._written)

    @property
    def complete(self) -> bool:
        """Whether every token exists."""
        return all(generation.done for generation in self._generations)

    @property
    def written(self) -> bool:
        """Whether every token is in the chunks so far."""
        return self.tokens_written == sum(generation.request.output_tokens for generation in self._generations)

    def whole(self, kv_transfer_params: dict[str, Any] | None = None) -> bytes:
        """Return the answer as one JSON document, with what another worker needs to go on from it."""
        choices = [self._choice(index, generation) for index, generation in enumerate(self._generations)]
        rest = {"choices": choices, "system_fingerprint": FINGERPRINT, "usage": self._usage()}
        return _json(self._head | rest | {"kv_transfer_params": kv_transfer_params})

    def chunks(self, most: int = sys.maxsize) -> bytes:
        """Return the events for what was generated since the last call, b"" for nothing.

        Args:
            most: how many tokens are written in all.
        """
        written = []
        for index, generation in enumerate(self._generations):
            first = self._written[index]
            last = min(generation.request.generated, first + most - self.tokens_written)
            if first == last or (first and not generation.done and last - first < self._interval):
                continue
            if not first and self._shape is CHAT:
                role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
                written.append(self._chunk(role, b',"prompt_token_ids":null', generation, 0))
            starts = range(first, last, self._interval)
            written += [self._token_chunk(index, generation, at, min(at + self._interval, last)) for at in starts]
            self._written[index] = last
        return b"".join(written)

    def ending(self) -> bytes:
        """Return what closes a stream: usage where it was asked for, and ``[DONE]``."""
        if not self._options.include_usage:
            return DONE
        last = self._head | {"object": self._shape.chunk_object, "system_fingerprint": FINGERPRINT}
        return b"data: " + _json(last | {"choices": [], "usage": self._usage()}) + b"\n\n" + DONE

    def _token_chunk(self, index: int, generation: Generation, start: int, end: int) -> bytes:
        text = _json("".join(generation.pieces[start:end]))
        last = end == generation.request.output_tokens
        ends = self._shape.going_on
        if last:
            ends = b'%b,"stop_reason":%b' % (_json(generation.finish_reason), _json(generation.stop_reason))
        logprobs = b"null" if generation.logprobs is None else _json(generation.logprobs.report(start, end))
        choice = b'{"index":%d,%b%b%b' % (index, self._shape.opening, text, self._shape.closing % (logprobs, ends))
        fingerprint = b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
        return self._chunk(choice, fingerprint if last and not self._options.include_usage else b"", generation, end)

    def _chunk(self, choice: bytes, rest: bytes, generation: Generation, tokens: int) -> bytes:
        usage = b""
        if self._options.include_usage and self._options.continuous_usage_stats:
            usage = b',"usage":' + _json(_usage(generation.request.prompt_tokens, tokens))
        return b"".join((self._chunk_head, choice, rest, usage, b"}\n\n"))

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        text = "".join(generation.pieces)
        logprobs = generation.logprobs
        end = {
            "logprobs": None if logprobs is None else logprobs.report(0, generation.request.output_tokens),
            "finish_reason": generation.finish_reason,
            "stop_reason": generation.stop_reason,
            "token_ids": None,
        }
        if self._shape is CHAT:
            return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}} | end
        return {"index": index, "text": text} | end

    def _usage(self) -> dict[str, Any]:
        requests = [generation.request for generation in self._generations]
        usage = _usage(sum(one.prompt_tokens for one in requests), sum(one.generated for one in requests))
        # vLLM reports the last prompt's, where there are several
        cached = requests[-1].cached_tokens if self._cached_tokens is None else self._cached_tokens
        usage["prompt_tokens_details"] = {"cached_tokens": cached} if self._details else None
        return usage


def _usage(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
