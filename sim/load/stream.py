"""Reads a streamed answer of the OpenAI API and notes when its parts arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

ANSWER: Final = "answer"  # key of the ``Answer`` in the context of locust's request event
_ERROR_CHARS: Final = 200


@dataclass(slots=True)
class Answer:
    """What one request saw; times in seconds of ``time.perf_counter``.

    Attributes:
        sent: when the request was sent.
        late_s: how much later that was than the scenario wanted.
        first: when the first token arrived, None before.
        ended: when the stream ended, or was not waited for any longer.
        gaps_s: times between two chunks with text.
        prompt_tokens: of the usage, 0 where none came.
        cached_tokens: of the usage, None where the engine does not report them.
        output_tokens: of the usage.
        complete: whether ``[DONE]`` came.
        error: what the stream said in place of an answer.
    """

    sent: float
    late_s: float = 0.0
    first: float | None = None
    ended: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    complete: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def latency_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.sent

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first; None where no usage came, or all of them in one chunk."""
        return (self.output_tokens - 1) / sum(self.gaps_s) if self.gaps_s and self.output_tokens else None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Error(msgspec.Struct):
    message: str
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_chunks = msgspec.json.Decoder(_Chunk)
_refusals = msgspec.json.Decoder(_Refusal)


def error_message(body: bytes) -> str:
    """Return what an answer that is an error says: message and code of the OpenAI API, else how it begins."""
    try:
        error = _refusals.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")[:_ERROR_CHARS]
    code = "" if error.code is None else f" ({error.code})"
    return error.message[:_ERROR_CHARS] + code


def read_answer(readline: Callable[[], bytes], answer: Answer, now: Callable[[], float]) -> None:
    """Read server-sent events until the stream ends; what they say goes into ``answer``.

    Args:
        readline: returns the next line as soon as it is there, b"" at the end.
        answer: is filled.
        now: the clock of ``answer.sent``.

    Raises:
        ValueError: an event is not JSON of the OpenAI API.
    """
    last = 0.0
    while line := readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            answer.complete = True
            continue
        arrived = now()
        try:
            chunk = _chunks.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"an event of the stream is no chunk of the OpenAI API: {error}") from None
        if chunk.error is not None:
            answer.error = f"the stream ended in an error: {chunk.error}"
        if chunk.usage is not None:
            _note_usage(chunk.usage, answer)
        if any(map(_has_token, chunk.choices or ())):
            if answer.first is None:
                answer.first = arrived
            else:
                answer.gaps_s.append(arrived - last)
            last = arrived


def _has_token(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def _note_usage(usage: _Usage, answer: Answer) -> None:
    answer.prompt_tokens, answer.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
