"""Typed views of OpenAI request bodies: only the fields that routing reads.

The engine, not the gateway, decides what a valid request is. ``parse_request`` refuses what no engine can read (broken
JSON, a prompt that is a number); anything else that it does not understand becomes an *opaque* request, which is
forwarded by load, without a look into its prompt.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final

import msgspec
from mmh3 import mmh3_x64_128_digest

from gateway.errors import BadRequest
from gateway.prompt.cache import ByteCache, Entry

MAX_OUTPUT_TOKENS: Final = 2**31 - 1
# Bodies beyond this that msgspec refuses are not given a second chance with the slower standard parser.
_SECOND_OPINION_BYTES: Final = 2**20
# A message of a few hundred bytes is decoded in less time than it takes to find it.
_LONG_CHAT_BYTES: Final = 8 * 2**10
_MESSAGE_OVERHEAD: Final = 500  # bytes of Python objects per message that is kept

ABSENT: Final = msgspec.Raw(b"")
"""What a raw field holds that is not in the request: this very object."""

Parts = list[Any]


class Message(msgspec.Struct, gc=False, omit_defaults=True):
    """One chat message: the fields that vLLM hands to a chat template.

    ``content`` is text or a list of parts. The rest is checked where it is used, as the engine does.
    """

    role: str
    content: str | Parts | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    name: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    task: Any = None
    tools: Any = None


class StreamOptions(msgspec.Struct, gc=False):
    """``stream_options`` of a request."""

    include_usage: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
    """What both kinds of request have in common.

    Attributes:
        model: model or adapter name, None when absent.
        cache_salt: separates caches of equal prompts.
        body_bytes: length of the body, for estimates.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    user: str | None = None
    tokens_limit: int | None = msgspec.field(default=None, name="max_tokens")
    truncate_prompt_tokens: Any = None
    body_bytes: int = msgspec.field(default=0, name="")  # no JSON field: set by parse_request

    @property
    def max_tokens(self) -> int | None:
        """Requested bound on output tokens, None when absent."""
        return _bounded(self.tokens_limit)

    @property
    def session(self) -> str | None:
        """What ties the requests of one conversation or user together, None when absent."""
        return self.session_id or self.user

    @property
    def include_usage(self) -> bool:
        """Whether the client asked for usage in its stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(_Request, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    kind: ClassVar[str] = "chat"

    messages: list[Message] = []
    tools: msgspec.Raw = ABSENT
    chat_template: Any = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    completion_tokens_limit: int | None = msgspec.field(default=None, name="max_completion_tokens")

    @property
    def max_tokens(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        limit = self.completion_tokens_limit
        return _bounded(self.tokens_limit if limit is None else limit)

    @property
    def opaque(self) -> bool:
        """True without messages, or when they are rendered in a way that only the engine can know."""
        return not self.messages or self.chat_template is not None or self.truncate_prompt_tokens is not None


class _RawChatRequest(ChatRequest, kw_only=True):
    messages: list[msgspec.Raw] = []  # type: ignore[assignment]  # until KnownMessages has read them


class CompletionRequest(_Request, kw_only=True):
    """Body of ``/v1/completions``. ``prompt`` is text, token ids, or a list of either."""

    kind: ClassVar[str] = "completions"

    prompt: str | list[Any] | None = None
    suffix: Any = None
    prompt_embeds: Any = None
    add_special_tokens: bool = True

    @property
    def opaque(self) -> bool:
        """True without a prompt, or when the engine makes something else of it."""
        return (
            not self.prompt
            or self.suffix is not None
            or self.prompt_embeds is not None
            or self.truncate_prompt_tokens is not None
        )


InferenceRequest = ChatRequest | CompletionRequest
"""A request whose prompt can be read here, unless it is ``opaque``; the engine may be able to read that, too."""

_CHAT: Final = msgspec.json.Decoder(ChatRequest)
_RAW_CHAT: Final = msgspec.json.Decoder(_RawChatRequest)
_MESSAGE: Final = msgspec.json.Decoder(Message)
_COMPLETION: Final = msgspec.json.Decoder(CompletionRequest)
_JSON_NAMES: Final = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
# What an engine could read in a field, by JSON type; engines convert "16" to 16 and 1 to true.
_READABLE: Final[dict[str, tuple[type, ...]]] = {
    "model": (str,),
    "stream": (bool, int, float, str),
    "max_tokens": (int, float, str),
    "max_completion_tokens": (int, float, str),
    "n": (int, float, str),
    "messages": (list,),
    "prompt": (str, list),
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


class _KnownMessage(Entry):
    __slots__ = ("message",)

    def __init__(self, message: Message, texts: list[str]) -> None:
        super().__init__(_MESSAGE_OVERHEAD + sum(text.__sizeof__() for text in texts))
        self.message = message


class KnownMessages:
    """Messages of long chats by their bytes: they come back with all that was said, and decoding text is slow.

    Besides, what is found here are the same strings as before, whose hashes Python has already computed. Messages are
    told apart by 128-bit hashes, as chunks are: two with the same one would make a wrong guess of what is cached, while
    the engine gets the request as it is. Only messages that are nothing but texts are kept: what others take in memory
    does not follow from their length.

    Args:
        max_bytes: bound on the messages.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteCache[bytes, _KnownMessage] = ByteCache(max_bytes)

    def read_chat(self, body: bytes) -> ChatRequest:
        """Read the body of a chat. Its messages are shared with other requests and must not be changed.

        Raises:
            msgspec.DecodeError: the body is not a chat; where, only decoding it as a whole can say.
            RecursionError: it is nested too deeply.
        """
        request = _RAW_CHAT.decode(body)
        lookup = self._known.entries.get
        messages = []
        for raw in request.messages:
            key = mmh3_x64_128_digest(raw)
            entry = lookup(key)
            if entry is None:
                message = _MESSAGE.decode(raw)
                self._keep(key, message)
            else:
                entry.used = True
                message = entry.message
            messages.append(message)
        chat: ChatRequest = request
        chat.messages = messages
        return chat

    def _keep(self, key: bytes, message: Message) -> None:
        values = [value for value in msgspec.structs.astuple(message) if value is not None]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) == len(values):
            self._known.put(key, _KnownMessage(message, texts))


def parse_request(path: str, body: bytes, known: KnownMessages | None = None) -> InferenceRequest:
    """Read a request body.

    Args:
        path: request path; ``…/chat/completions`` is a chat, anything else a completion.
        body: the whole body.
        known: messages of earlier requests, for long chats.

    Raises:
        BadRequest: the body is not a JSON object, or a field has a type that no engine accepts; ``param`` names it.
    """
    is_chat = path.endswith("/chat/completions")
    request: InferenceRequest
    if is_chat and known is not None and len(body) >= _LONG_CHAT_BYTES:
        try:
            request = known.read_chat(body)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            request.body_bytes = len(body)
            return request
    try:
        request = _CHAT.decode(body) if is_chat else _COMPLETION.decode(body)
    except msgspec.ValidationError:
        request = _opaque(ChatRequest() if is_chat else CompletionRequest(), _parse_loosely(body))
    except msgspec.DecodeError as error:
        request = _opaque(ChatRequest() if is_chat else CompletionRequest(), _second_opinion(body, error))
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    request.body_bytes = len(body)
    return request


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
    """Parse with the parser that engines use: it accepts NaN, for one."""
    if not body:
        raise BadRequest("The request body is empty; send a JSON object.")
    if len(body) <= _SECOND_OPINION_BYTES:
        try:
            fields = json.loads(body)
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("The request body holds a lone surrogate, which is not valid Unicode.") from None
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
    for name, readable in _READABLE.items():
        value = fields.get(name)
        if value is not None and not isinstance(value, readable):
            wanted = " or ".join(dict.fromkeys(_JSON_NAMES[one] for one in readable))
            raise BadRequest(f"{name!r} must be of type {wanted}, not {_type_name(value)}.", param=name)
    for index, message in enumerate(fields.get("messages") or ()):
        if not isinstance(message, dict):
            where = f"messages[{index}]"
            raise BadRequest(f"{where!r} must be of type object, not {_type_name(message)}.", param=where)
    for name, kept in _KEPT.items():
        value = fields.get(name)
        if isinstance(value, kept):
            setattr(request, name, value)
    limit = fields.get("max_completion_tokens")
    if limit is None:
        limit = fields.get("max_tokens")
    if isinstance(limit, int):
        request.tokens_limit = limit
    return request


def _bounded(limit: int | None) -> int | None:
    return None if limit is None else max(0, min(limit, MAX_OUTPUT_TOKENS))


def _type_name(value: Any) -> str:
    return "null" if value is None else _JSON_NAMES.get(type(value), "number")
