"""Requests as routing sees them: only the fields that it reads. ``parsing`` makes them of bodies."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

MAX_OUTPUT_TOKENS: Final = 2**31 - 1
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


class TransferParams(msgspec.Struct, gc=False):
    """``kv_transfer_params`` of a request; ids there are what the engine runs in place of the messages."""

    prompt_token_ids: Any = None


class _Request(msgspec.Struct, kw_only=True):
    """What all kinds of request have in common.

    Attributes:
        model: model or adapter name, None when absent.
        cache_salt: separates caches of equal prompts.
        body: as it came.
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
    body: Any = msgspec.field(default=b"", name="")  # no JSON field: bytes, set by parse_request

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
    """Body of ``/v1/chat/completions``.

    Attributes:
        name_first: whether the functions of tool calls reach the template with their name first.
        conversation: what is known of its beginning, see ``growth``; None where nothing is.
    """

    kind: ClassVar[str] = "chat"
    path: ClassVar[str] = "/v1/chat/completions"
    name_first: ClassVar[bool] = False

    messages: list[Message] = []
    tools: msgspec.Raw = ABSENT
    chat_template: Any = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    kv_transfer_params: TransferParams | None = None
    completion_tokens_limit: int | None = msgspec.field(default=None, name="max_completion_tokens")
    conversation: Any = msgspec.field(default=None, name=" ")  # no JSON field either

    @property
    def max_tokens(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        limit = self.completion_tokens_limit
        return _bounded(self.tokens_limit if limit is None else limit)

    @property
    def opaque(self) -> bool:
        """True without messages, or when the engine makes something else of them."""
        params = self.kv_transfer_params
        return (
            not self.messages
            or self.truncate_prompt_tokens is not None
            or (params is not None and params.prompt_token_ids is not None)
        )


class MessagesRequest(ChatRequest, kw_only=True):
    """Body of ``/v1/messages`` as the chat that it becomes.

    Attributes:
        thinking_disabled: by the client; the reasoning effort that stands for it depends on the model.
        settled: what depends on the model's templates is done, see ``ChatRenderer.settle``.
    """

    kind: ClassVar[str] = "messages"
    path: ClassVar[str] = "/v1/messages"

    thinking_disabled: bool = False
    settled: bool = False


class ResponsesRequest(ChatRequest, kw_only=True):
    """Body of ``/v1/responses`` as the chat that it becomes; opaque where an engine's stored responses belong to it.

    Attributes:
        cut_to_fit: whether the engine drops the beginning of a prompt that is too long for it.
    """

    kind: ClassVar[str] = "responses"
    path: ClassVar[str] = "/v1/responses"
    name_first: ClassVar[bool] = True

    cut_to_fit: bool = False


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


def _bounded(limit: int | None) -> int | None:
    return None if limit is None else max(0, min(limit, MAX_OUTPUT_TOKENS))
