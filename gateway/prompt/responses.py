"""OpenAI Responses bodies, read as the chats that vLLM makes of them.

As ``construct_input_messages`` in vllm/entrypoints/openai/responses/utils.py. What an engine has stored (a previous
response) cannot be seen here; such requests are left to it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.prompt.conversation import Unreadable
from gateway.prompt.request import ABSENT, Message, ResponsesRequest, TransferParams
from gateway.prompt.tools import NAMESPACE_SEPARATOR

_IMAGE_FIELDS: Final = ("type", "detail", "file_id", "image_url")
_UNFINISHED: Final = frozenset({"in_progress", "incomplete"})


class _Item(msgspec.Struct, gc=False):
    """One item of the input: a message, a tool call, its output, or a thought; fields are checked where they count."""

    type: str | None = None
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    status: Any = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class _Reasoning(msgspec.Struct, gc=False):
    effort: str | None = None


class _Body(msgspec.Struct):
    input: str | list[_Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    tools: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    reasoning: _Reasoning | None = None
    truncation: str | None = "disabled"
    kv_transfer_params: TransferParams | None = None
    previous_response_id: Any = None
    previous_input_messages: Any = None
    prompt: Any = None


_BODY: Final = msgspec.json.Decoder(_Body)


def read_responses(body: bytes) -> ResponsesRequest:
    """Read the body of ``/v1/responses``; it has no messages where only the engine can tell what it makes of them.

    Raises:
        msgspec.DecodeError: it is not JSON, or a field is not what it should be.
        RecursionError: it is nested too deeply.
    """
    read = _BODY.decode(body)
    request = ResponsesRequest(
        model=read.model,
        stream=read.stream,
        cache_salt=read.cache_salt,
        priority=read.priority,
        tokens_limit=read.max_output_tokens,
        session_id=read.session_id or read.prompt_cache_key,
        user=read.user,
        tools=ABSENT if bytes(read.tools) == b"[]" else read.tools,
        chat_template_kwargs=read.chat_template_kwargs,
        reasoning_effort=None if read.reasoning is None else read.reasoning.effort,
        add_special_tokens=True,
        cut_to_fit=read.truncation != "disabled",
        kv_transfer_params=read.kv_transfer_params,
    )
    if read.previous_response_id is not None or read.previous_input_messages or read.prompt is not None:
        return request
    try:
        request.messages = _chat(read)
    except Unreadable:
        return request
    if _is_unfinished(read.input):
        request.continue_final_message, request.add_generation_prompt = True, False
    return request


def _is_unfinished(items: str | list[_Item]) -> bool:
    if isinstance(items, str) or not items:
        return False
    last = items[-1]
    return last.type in (None, "message", "reasoning") and last.status in _UNFINISHED


def _chat(body: _Body) -> list[Message]:
    messages: list[Message] = []
    if isinstance(body.input, str):
        messages.append(Message("user", body.input))
    else:
        for item in body.input:
            _add(item, messages)
    return [Message("system", body.instructions), *messages] if body.instructions else messages


def _add(item: _Item, messages: list[Message]) -> None:
    """Add an item's message; what an assistant says, thinks and calls in a row makes up one message."""
    match item.type:
        case "function_call":
            name = _text(item.name)
            if item.namespace:
                name = f"{item.namespace}{NAMESPACE_SEPARATOR}{name}"
            _add_call(item, name, _text(item.arguments), messages)
        case "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.input or ""}).decode()
            _add_call(item, _text(item.name), arguments, messages)
        case "function_call_output" | "custom_tool_call_output":
            output = item.output if isinstance(item.output, str) else _parts(item.output)
            messages.append(Message("tool", output, tool_call_id=_text(item.call_id)))
        case "reasoning":
            _add_to_assistant("reasoning", _thought(item), messages)
        case None | "message":
            _add_message(item, messages)
        case _:
            raise Unreadable(f"an item of type {item.type!r}")


def _add_message(item: _Item, messages: list[Message]) -> None:
    content = item.content
    match item.role:
        case "assistant":
            # vLLM takes the first part alone
            text = content if isinstance(content, str) else _text(content[0].get("text") if content else None)
            _add_to_assistant("content", text, messages)
        case "user" | "system" | "developer":
            messages.append(Message(item.role, content if isinstance(content, str) else _parts(content)))
        case _:
            raise Unreadable(f"a message of role {item.role!r}")


def _add_to_assistant(field: str, text: str, messages: list[Message]) -> None:
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and getattr(last, field) is None:
        setattr(last, field, text)
    else:
        messages.append(Message("assistant", **{field: text}))


def _add_call(item: _Item, name: str, arguments: str, messages: list[Message]) -> None:
    call = {"id": _text(item.call_id), "function": {"name": name, "arguments": arguments}, "type": "function"}
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        messages.append(Message("assistant", tool_calls=[call]))
    else:
        last.tool_calls = [*(last.tool_calls or ()), call]


def _thought(item: _Item) -> str:
    if item.summary is None or item.encrypted_content:
        raise Unreadable("a thought without summary, or encrypted")
    texts = item.content or item.summary
    if isinstance(texts, str):
        raise Unreadable("a thought is a list of texts")
    return _text(texts[0].get("text")) if texts else ""


def _parts(parts: list[dict[str, Any]] | None) -> list[Any]:
    """Return content parts with the fields that vLLM lets through."""
    if parts is None:
        raise Unreadable("a message without content")
    found: list[Any] = []
    for part in parts:
        match part.get("type"):
            case "input_text":
                found.append({"type": "input_text", "text": _text(part.get("text"))})
            case "input_image":
                found.append({key: part[key] for key in _IMAGE_FIELDS if key in part})
            case kind:
                raise Unreadable(f"a content part of type {kind!r}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"text expected, not {type(value).__name__}")
    return value
