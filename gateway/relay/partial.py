"""The pure half of stream resumption: what a partial answer is, how it is continued, and how its rest is joined to it.

An engine is asked for the rest by putting the text so far at the end of the prompt. That is the same request only where
the text is all that the engine's state consists of, hence ``refusal_of``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from gateway.relay.sse import data_of

_DONE: Final = b"[DONE]"
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_CHAT_PATH: Final = "/v1/chat/completions"
RESUMABLE_PATHS: Final = frozenset({_CHAT_PATH, "/v1/completions"})

_encode = msgspec.json.encode
_decode = msgspec.json.decode


class Refusal(StrEnum):
    """Why a stream is not continued elsewhere."""

    CHOICES = "several_choices"
    TOOLS = "tools"
    LOGPROBS = "logprobs"
    CONSTRAINED = "constrained_decoding"
    REASONING = "reasoning"
    STOP = "stop_string"  # one may have begun
    PROMPT = "prompt"  # it is no single text, or the answer does not simply follow it
    ENGINE = "engine_field"  # the answer holds more of the engine's state than text
    NO_LIMIT = "no_max_tokens"  # engines differ in what they take for it
    UNREADABLE = "unreadable"
    FINISHED = "finished"
    TOO_LONG = "too_long"
    TOO_OFTEN = "too_often"
    NO_WORKER = "no_other_worker"
    NO_BUDGET = "retry_budget"


_REFUSED_FIELDS: Final = {
    "use_beam_search": Refusal.CHOICES,
    "tools": Refusal.TOOLS,
    "tool_choice": Refusal.TOOLS,
    "functions": Refusal.TOOLS,
    "function_call": Refusal.TOOLS,
    "logprobs": Refusal.LOGPROBS,
    "top_logprobs": Refusal.LOGPROBS,
    "prompt_logprobs": Refusal.LOGPROBS,
    "response_format": Refusal.CONSTRAINED,
    "structured_outputs": Refusal.CONSTRAINED,
    "guided_json": Refusal.CONSTRAINED,
    "guided_regex": Refusal.CONSTRAINED,
    "guided_choice": Refusal.CONSTRAINED,
    "guided_grammar": Refusal.CONSTRAINED,
    "json_schema": Refusal.CONSTRAINED,
    "regex": Refusal.CONSTRAINED,
    "ebnf": Refusal.CONSTRAINED,
    "structural_tag": Refusal.CONSTRAINED,
    "echo": Refusal.PROMPT,
    "suffix": Refusal.PROMPT,
    "prompt_embeds": Refusal.PROMPT,
    "truncate_prompt_tokens": Refusal.PROMPT,
    "kv_transfer_params": Refusal.ENGINE,
    "return_token_ids": Refusal.ENGINE,
    "return_hidden_states": Refusal.ENGINE,
    "stop_regex": Refusal.STOP,
}
_MAX_STOP_CHARS: Final = 256


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk: Final = msgspec.json.Decoder(_Chunk).decode


class PartialAnswer:
    """What a stream has brought so far.

    Args:
        max_bytes: bound on its text; beyond it none is kept.

    Attributes:
        refusal: why it cannot be continued, None while it can.
        events: those with text, each of one token at least.
        usage: the engine's last count, None where it gives none before the end.
        identity: ``id``, ``created`` and ``model`` of the stream.
    """

    __slots__ = ("_max_bytes", "_pieces", "_size", "events", "identity", "refusal", "usage")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[str] = []
        self._size = 0
        self.refusal: Refusal | None = None
        self.events = 0
        self.usage: _Usage | None = None
        self.identity: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def note(self, event: bytes) -> None:
        """Read the next event."""
        data = data_of(event)
        if not data or self.refusal is not None:
            return
        if data == _DONE:
            self.refuse(Refusal.FINISHED)
            return
        try:
            chunk = _decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.refuse(Refusal.UNREADABLE)
            return
        if not self.identity:
            self.identity = {"id": chunk.id, "created": chunk.created, "model": chunk.model}
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.error is not None:
            self.refuse(Refusal.FINISHED)
        elif len(chunk.choices) > 1:
            self.refuse(Refusal.CHOICES)
        elif chunk.choices:
            self._note_choice(chunk.choices[0])

    def _note_choice(self, choice: _Choice) -> None:
        delta = choice.delta or _Delta()
        text = delta.content or choice.text or ""
        self._size += len(text.encode())
        if choice.index:
            self.refuse(Refusal.CHOICES)
        elif delta.reasoning or delta.reasoning_content:
            self.refuse(Refusal.REASONING)
        elif delta.tool_calls:
            self.refuse(Refusal.TOOLS)
        elif choice.finish_reason is not None:
            self.refuse(Refusal.FINISHED)
        elif self._size > self._max_bytes:
            self.refuse(Refusal.TOO_LONG)
        elif text:
            self.events += 1
            self._pieces.append(text)

    def refuse(self, reason: Refusal) -> None:
        """Give it up: what there is of its text is no longer kept."""
        self.refusal = reason
        self._pieces.clear()


def refusal_of(path: str, body: bytes, text: str) -> Refusal | None:
    """Return why a request's answer could not be continued, None where it could.

    Args:
        path: the request's path.
        body: its body.
        text: the answer so far.
    """
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Refusal.UNREADABLE
    if any(fields.get(name) not in (None, 1) for name in ("n", "best_of")):
        return Refusal.CHOICES
    for name, reason in _REFUSED_FIELDS.items():
        if _matters(fields.get(name)):
            return reason
    if fields.get("include_reasoning") is False or "<think>" in text or "</think>" in text:
        return Refusal.REASONING
    if _may_be_stopping(text.rstrip(), fields.get("stop")):
        return Refusal.STOP
    if not all(isinstance(fields.get(name), int | None) for name in (*_LIMITS, "min_tokens")):
        return Refusal.UNREADABLE
    if path == _CHAT_PATH:
        messages = fields.get("messages")
        if not messages:
            return Refusal.PROMPT
        is_text = isinstance(messages[-1].get("content"), str)
        return None if is_text or not fields.get("continue_final_message") else Refusal.PROMPT
    if not isinstance(fields.get("prompt"), str):
        return Refusal.PROMPT
    return None if fields.get("max_tokens") else Refusal.NO_LIMIT


def _matters(value: Any) -> bool:
    """Return whether a field's value asks for something; 0 does: of log-probabilities it is a number."""
    if value is None or value is False or value == "none":
        return False
    return value not in ([], {}, {"type": "text"})


def _may_be_stopping(text: str, stop: Any) -> bool:
    """Return whether a text ends with a stop string or the beginning of one: the next engine would not know of it.

    vLLM holds back what may be one, unless the client wants it in the answer (``include_stop_str_in_output``).
    """
    given = stop if isinstance(stop, list) else [stop]
    return any(
        len(one) > _MAX_STOP_CHARS or any(text.endswith(one[:length]) for length in range(1, len(one) + 1))
        for one in given
        if isinstance(one, str)
    )


def continued_body(path: str, body: bytes, text: str, sent: int = 0) -> bytes:
    """Return the request for the rest of an answer.

    Args:
        path: the request's path.
        body: its body, for which there is no ``refusal_of``.
        text: the answer so far, not ending in whitespace; empty: the request is made anew.
        sent: tokens in it, by which the limits are lowered.
    """
    if not text:
        return body
    fields = _decode(body)
    if path != _CHAT_PATH:
        fields["prompt"] += text
    elif fields.get("continue_final_message"):
        *earlier, final = fields["messages"]
        fields["messages"] = [*earlier, final | {"content": final["content"] + text}]
    else:
        fields["messages"].append({"role": "assistant", "content": text})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    for name in _LIMITS:
        if fields.get(name):
            fields[name] = max(1, fields[name] - sent)
    if fields.get("min_tokens"):
        fields["min_tokens"] = max(0, fields["min_tokens"] - sent)
    return _encode(fields)


class Joint:
    """Makes the events of a continuation those of the stream that it continues.

    Args:
        identity: what every event is marked with.
        owed: whitespace at the end of the text so far. Chat templates and tokenizers treat it in ways of their own, so
            the continuation was asked for without it, and begins with it once more.
        prompt_tokens: of the client's prompt, None where that is not known.
        sent: tokens of the answer that are in the continuation's prompt.
    """

    def __init__(self, identity: dict[str, Any], owed: str, prompt_tokens: int | None, sent: int) -> None:
        self._identity = identity
        self._owed = owed
        self._prompt_tokens = prompt_tokens
        self._sent = sent

    def rewrite(self, event: bytes) -> bytes:
        """Return an event, given without the empty line at its end, as the client is to see it, with it; or nothing."""
        try:
            chunk = _decode(data_of(event))
            choices = chunk["choices"]
            if choices and not self._rewrite_choice(choices[0]):
                return b""
            if chunk.get("usage") is not None:
                self._add_up(chunk["usage"])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError):
            return event + b"\n\n"  # [DONE], a comment, an error: nothing that is ours to change
        chunk |= {name: value for name, value in self._identity.items() if name in chunk}
        return b"data: %b\n\n" % _encode(chunk)

    def _rewrite_choice(self, choice: dict[str, Any]) -> bool:
        """Take out what the client has already; return whether anything is left."""
        delta = choice.get("delta")
        holder, name = (choice, "text") if delta is None else (delta, "content")
        holder.pop("role", None)
        if holder.get(name):
            holder[name] = self._unsent(holder[name])
        return bool(choice.get("finish_reason") or any((choice if delta is None else delta).get(key) for key in _SAID))

    def _unsent(self, text: str) -> str:
        """Return text without the whitespace that the client has already."""
        while self._owed and text:
            if text[0] != self._owed[0]:
                self._owed = ""
                break
            text, self._owed = text[1:], self._owed[1:]
        return text

    def _add_up(self, usage: dict[str, Any]) -> None:
        total = usage["prompt_tokens"] + usage["completion_tokens"]
        prompt = self._prompt_tokens
        if prompt is None:
            prompt = max(0, usage["prompt_tokens"] - self._sent)
        usage |= {"prompt_tokens": prompt, "completion_tokens": total - prompt, "total_tokens": total}
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)


_SAID: Final = ("text", "content", "reasoning", "reasoning_content", "tool_calls", "refusal")
