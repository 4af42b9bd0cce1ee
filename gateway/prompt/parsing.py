"""From a body to a request.

The engine, not the gateway, decides what a valid request is. ``parse_request`` refuses what no engine can read (broken
JSON, a prompt that is a number); anything else that it does not understand becomes an *opaque* request, which is
forwarded by load, without a look into its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from gateway.errors import BadRequest
from gateway.prompt.anthropic import read_messages
from gateway.prompt.growth import LEAST_BYTES, Conversations
from gateway.prompt.request import (
    ABSENT,
    ChatRequest,
    CompletionRequest,
    InferenceRequest,
    MessagesRequest,
    ResponsesRequest,
)
from gateway.prompt.responses import read_responses

# Bodies with more values than this that msgspec refuses get no second chance with the slower standard parser.
_SECOND_OPINION_COMMAS: Final = 100_000


_CHAT: Final = msgspec.json.Decoder(ChatRequest)
_COMPLETION: Final = msgspec.json.Decoder(CompletionRequest)
_NULL: Final = msgspec.Raw(b"null")
_JSON_NAMES: Final = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
# What an engine could read in a field, by JSON type; engines convert "16" to 16 and 1 to true.
_READABLE: Final[dict[str, tuple[type, ...]]] = {
    "model": (str,),
    "stream": (bool, int, float, str),
    "max_tokens": (int, float, str),
    "max_completion_tokens": (int, float, str),
    "max_output_tokens": (int, float, str),
    "n": (int, float, str),
}
# The same for the field that holds the prompt, by kind of request.
_PROMPTS: Final[dict[str, tuple[str, tuple[type, ...]]]] = {
    "chat": ("messages", (list,)),
    "messages": ("messages", (list,)),
    "responses": ("input", (str, list)),
    "completions": ("prompt", (str, list)),
}
# What is kept of a request that is otherwise opaque.
_KEPT: Final[dict[str, type]] = {
    "model": str,
    "stream": bool,
    "n": int,
    "cache_salt": str,
    "session_id": str,
    "user": str,
}


def parse_request(path: str, body: bytes, known: Conversations | None = None) -> InferenceRequest:
    """Read a request body.

    Args:
        path: request path; ``…/chat/completions``, ``…/messages`` and ``…/responses`` are chats, anything else is a
            completion.
        body: the whole body.
        known: conversations of earlier requests, for long chats.

    Raises:
        BadRequest: the body is not a JSON object, or a field has a type that no engine accepts; ``param`` names it.
    """
    kind, read = _reader(path)
    request: InferenceRequest | None = None
    if kind is ChatRequest and known is not None and len(body) >= LEAST_BYTES:
        with suppress(msgspec.DecodeError, RecursionError):
            request = known.read(body)
    try:
        if request is None:
            request = read(body)
            if isinstance(request, ChatRequest):
                request.conversation = None
    except msgspec.ValidationError:
        request = _opaque(kind(), _parse_loosely(body))
    except msgspec.DecodeError as error:
        request = _opaque(kind(), _second_opinion(body, error))
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    if kind is not CompletionRequest:
        _drop_nulls(request)
    request.body = body
    return request


def _reader(path: str) -> tuple[type[InferenceRequest], Callable[[bytes], InferenceRequest]]:
    if path.endswith("/chat/completions"):
        return ChatRequest, _CHAT.decode
    if path.endswith("/messages"):
        return MessagesRequest, read_messages
    if path.endswith("/responses"):
        return ResponsesRequest, read_responses
    return CompletionRequest, _COMPLETION.decode


def _drop_nulls(request: Any) -> None:
    """Take raw fields that are null for absent, as engines do."""
    if request.tools == _NULL:
        request.tools = ABSENT
    if request.chat_template_kwargs == _NULL:
        request.chat_template_kwargs = ABSENT
    if request.documents == _NULL:
        request.documents = ABSENT


def _parse_loosely(body: bytes) -> dict[str, Any]:
    """Parse a body of which msgspec has already seen that it is JSON so far."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        return _second_opinion(body, error)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    return _object(fields)


def _second_opinion(body: bytes, error: msgspec.DecodeError) -> dict[str, Any]:
    """Parse with the parser that engines use: it accepts NaN, and lone surrogates in what the engine does not read."""
    if not body:
        raise BadRequest("The request body is empty; send a JSON object.")
    if body.count(b",") <= _SECOND_OPINION_COMMAS:
        try:
            fields = json.loads(body)
        except RecursionError:
            raise BadRequest("The request body is nested too deeply.") from None
        except ValueError:  # the error that msgspec gave says where
            pass
        else:
            return _object(fields)
    raise BadRequest(f"The request body is not valid JSON: {error}.") from None


def _object(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_type_name(fields)}.")
    return fields


def _opaque(request: InferenceRequest, fields: dict[str, Any]) -> InferenceRequest:
    """Fill an empty request, all but the prompt, from fields that are not what they should be.

    Raises:
        BadRequest: a field that no engine could read.
    """
    prompt, of_prompt = _PROMPTS[request.kind]
    for name, readable in (*_READABLE.items(), (prompt, of_prompt)):
        value = fields.get(name)
        if value is not None and not isinstance(value, readable):
            wanted = " or ".join(dict.fromkeys(_JSON_NAMES[one] for one in readable))
            raise BadRequest(f"{name!r} must be of type {wanted}, not {_type_name(value)}.", param=name)
    for index, message in enumerate(fields.get(prompt) or () if prompt == "messages" else ()):
        if not isinstance(message, dict):
            where = f"messages[{index}]"
            raise BadRequest(f"{where!r} must be of type object, not {_type_name(message)}.", param=where)
    for name, kept in _KEPT.items():
        value = fields.get(name)
        if isinstance(value, kept) and not _has_surrogate(value):
            setattr(request, name, value)
    limits = (fields.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    limit = next((limit for limit in limits if limit is not None), None)
    if isinstance(limit, int):
        request.tokens_limit = limit
    return request


def _has_surrogate(value: Any) -> bool:
    """Return whether a value is a text with a lone surrogate, which can be neither hashed nor sent on."""
    return isinstance(value, str) and value.encode(errors="replace").decode() != value


def _type_name(value: Any) -> str:
    return "null" if value is None else _JSON_NAMES.get(type(value), "number")
