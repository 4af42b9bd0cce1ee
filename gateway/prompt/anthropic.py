"""Anthropic Messages bodies, read as the chats that vLLM makes of them.

As ``AnthropicServingMessages.to_chat_completion_request`` in vllm/entrypoints/anthropic/serving.py. Two things depend
on the model's template and are settled later, by ``ChatRenderer.settle``: whether system messages may stand between
others, and which reasoning effort stands for disabled thinking.
"""

from __future__ import annotations

from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from gateway.prompt.conversation import BILLING_HEADER, Unreadable
from gateway.prompt.request import ABSENT, Message, MessagesRequest, TransferParams

EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_PROBE: Final = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class _Block(msgspec.Struct, gc=False):
    type: str
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None


class _Turn(msgspec.Struct, gc=False):
    role: str
    content: str | list[_Block]


class _Thinking(msgspec.Struct, gc=False):
    type: str


class _OutputConfig(msgspec.Struct, gc=False):
    effort: str | None = None


class _Metadata(msgspec.Struct, gc=False):
    user_id: str | None = None


class _Body(msgspec.Struct):
    messages: list[_Turn]
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    system: str | list[_Block] | None = None
    tools: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    metadata: _Metadata | None = None
    kv_transfer_params: TransferParams | None = None


_BODY: Final = msgspec.json.Decoder(_Body)


def read_messages(body: bytes) -> MessagesRequest:
    """Read the body of ``/v1/messages``; it has no messages where only the engine can tell what it makes of them.

    Raises:
        msgspec.DecodeError: it is not JSON, or a field is not what it should be.
        RecursionError: it is nested too deeply.
    """
    read = _BODY.decode(body)
    request = MessagesRequest(
        model=read.model,
        stream=read.stream,
        cache_salt=read.cache_salt,
        tokens_limit=read.max_tokens,
        user=None if read.metadata is None else read.metadata.user_id,
        tools=read.tools,
        chat_template_kwargs=read.chat_template_kwargs,
        kv_transfer_params=read.kv_transfer_params,
        reasoning_effort=None if read.output_config is None else read.output_config.effort,
        thinking_disabled=read.thinking is not None and read.thinking.type == "disabled",
    )
    try:
        request.messages = _chat(read)
    except Unreadable:
        request.messages = []
    return request


def _chat(body: _Body) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else _joined(body.system)
        if text:
            messages.append(Message("system", text))
    for turn in body.messages:
        if turn.role == "system":
            _add_system(turn.content, messages)
        elif turn.role not in ("user", "assistant"):
            raise Unreadable(f"a message of role {turn.role!r}")
        elif isinstance(turn.content, str):
            messages.append(Message(turn.role, turn.content))
        else:
            _add_blocks(turn.role, turn.content, messages)
    return messages


def _add_system(content: str | list[_Block], messages: list[Message]) -> None:
    text = content if isinstance(content, str) else _joined(content)
    if text and not text.startswith(BILLING_HEADER):
        messages.append(Message("system", text))


def _joined(blocks: list[_Block]) -> str:
    if any(block.type in ("tool_addition", "tool_removal") for block in blocks):
        raise Unreadable("tools change within the conversation")
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return "".join([text for text in texts if not text.startswith(BILLING_HEADER)])


def _add_blocks(role: str, blocks: list[_Block], messages: list[Message]) -> None:
    """Add the message that the blocks make up, after those of the tool results among them."""
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.type:
            case "text" if block.text:
                parts.append({"type": "text", "text": block.text})
            case "image" if block.source:
                parts.append(_image(block.source))
            case "thinking" if block.thinking is not None:
                thoughts.append(block.thinking)
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                _add_result(block, messages)
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {_only_text(block.content)}"})
            case "text" | "image" | "thinking" | "redacted_thinking" | "tool_reference":
                pass  # vLLM drops these
            case _:
                raise Unreadable(f"a block of type {block.type!r}")
    if role == "user" and not parts:
        return
    content = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts or None
    reasoning = "".join(thoughts) if thoughts else None
    messages.append(Message(role, content, tool_calls=calls or None, reasoning=reasoning))


def _call(block: _Block) -> dict[str, Any]:
    arguments = bytes(block.input)
    if not block.id:
        raise Unreadable("a tool call without an id, which the engine makes up")
    if arguments in (b"", b"null"):
        arguments = b"{}"
    elif not arguments.startswith(b"{"):
        raise Unreadable("the input of a tool is not an object")
    function = {"name": block.name or "", "arguments": arguments.decode()}
    return {"id": block.id, "type": "function", "function": function}


def _add_result(block: _Block, messages: list[Message]) -> None:
    text, images = block.content or "", []
    if not isinstance(text, str):
        items, texts = text, []
        for item in items:
            match item.get("type"):
                case "text":
                    texts.append(_only_text(item.get("text", "")))
                case "image":
                    images.append(_image(item.get("source", {})))
                case "tool_reference":
                    raise Unreadable("a reference to a tool")
        text = "\n".join(texts)
    messages.append(Message("tool", text, tool_call_id=block.tool_use_id or ""))
    if images:
        messages.append(Message("user", images))


def _image(source: Any) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise Unreadable("the source of an image is not an object")
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _only_text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"text expected, not {type(value).__name__}")
    return value or ""


def wants_system_first(template: str) -> bool:
    """Return whether vLLM merges all system messages into one at the beginning for a chat template.

    It does if the template fails with one in between, in a plain environment: one without what ``transformers`` adds.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    try:
        environment.from_string(template).render(messages=_PROBE, add_generation_prompt=False)
    except Exception:  # a template is a program: it can raise anything
        return True
    return False


def with_system_first(messages: list[Message]) -> list[Message]:
    """Return the messages with all system messages merged into one at the beginning."""
    texts = [message.content for message in messages if message.role == "system" and isinstance(message.content, str)]
    others = [message for message in messages if message.role != "system"]
    return [Message("system", "".join(texts)), *others] if texts else others
