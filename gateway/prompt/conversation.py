"""From a chat request to what the engine hands to its chat template.

vLLM normalises messages before it renders them: parts become text, tool-call arguments become objects, unknown fields
go. The same happens here, in two steps. ``outline`` separates each message into its *shape* (role, which fields, how
many tool calls) and its *leaves* (the texts); ``build`` puts message dictionaries together from the two. Because
everything that is rendered is built from an outline, conversations of equal shapes differ in their leaves alone, which
is what ``plan`` makes use of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gateway.prompt.request import Message

# Part types that are text, and the field in which the text lies (vllm/renderers/chat_utils.py, MM_PARSER_MAP).
_TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MODALITIES: Final = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
# Fields of parts that vLLM consumes; all others are passed on to templates that take parts.
_PART_FIELDS: Final = frozenset(
    "audio_embeds audio_url closed data file image_embeds image_pil image_url input_audio name "
    "prompt_cache_breakpoint refusal text thinking type uuid video_embeds video_url".split()
)
_CALL_FIELDS: Final = ("arguments", "name")
# Fields of functions in vLLM's order, and their types; with others, the order is another one.
_FUNCTION_FIELDS: Final[dict[str, Any]] = {
    "name": str,
    "description": str,
    "parameters": dict,
    "strict": (bool, type(None)),
}
BILLING_HEADER: Final = "x-anthropic-billing-header"  # changes with every request; vLLM drops that line


# JSON is read in one go, in which no other thread runs: with so many values that would take some 20 ms.
_MANY_COMMAS: Final = 50_000


class Unreadable(Exception):
    """Messages of which only the engine can say what it makes of them, if anything."""


class Shape(NamedTuple):
    """A message without its texts. Plain messages, a role and one text, have just their role as shape.

    Attributes:
        role: of the author.
        parts: None: content is one text. Else per part whether it is text, and its other fields as JSON.
        reasoning: whether there is a reasoning text.
        tool_call_id: whether there is one.
        calls: per tool call the fields of its function, and the unusual ones of itself, as JSON; None without tool
            calls.
        others: remaining fields, as JSON.
    """

    role: str
    parts: tuple[tuple[bool, bytes], ...] | None
    reasoning: bool
    tool_call_id: bool
    calls: tuple[tuple[bytes, bytes], ...] | None
    others: bytes

    def size(self) -> int:
        """Return how long the fields are that a client can make long, in bytes."""
        parts = sum(len(others) for _, others in self.parts or ())
        calls = sum(len(of_function) + len(of_call) for of_function, of_call in self.calls or ())
        return len(self.role) + parts + calls + len(self.others)


Shapes = list["str | Shape"]
_Part = tuple[str | None, dict[str, Any]]
"""A content part: its text, None for media, and its other fields."""


class Outline(NamedTuple):
    """Shapes and leaves of a conversation, and the first message that holds something else than text, if any."""

    shapes: Shapes
    leaves: list[str]
    first_media: int | None


def outline(messages: Sequence[Message], parts: bool, name_first: bool = False) -> Outline:
    """Separate messages into shapes and leaves.

    Args:
        messages: of the request.
        parts: whether the template takes content as a list of parts, or as one text.
        name_first: whether the functions of tool calls begin with their name, or with the arguments.

    Raises:
        Unreadable: the engine would refuse the messages, or treat them in a way not known here.
    """
    shapes: Shapes = []
    leaves: list[str] = []
    first_media: int | None = None
    for index, message in enumerate(messages):
        content = message.content
        # hot path: most messages are a role and a text
        if (
            type(content) is str
            and message.tool_calls is None
            and message.tool_call_id is None
            and message.name is None
            and message.reasoning is None
            and message.reasoning_content is None
            and message.task is None
            and (message.role != "system" or not content.startswith(BILLING_HEADER))
            and message.role != "developer"
        ):
            shapes.append(message.role)
            leaves.append(content)
            continue
        shape, has_media = _outline_one(message, parts, name_first, leaves)
        shapes.append(shape)
        if has_media and first_media is None:
            first_media = index
    return Outline(shapes, leaves, first_media)


def _outline_one(message: Message, parts: bool, name_first: bool, leaves: list[str]) -> tuple[Shape, bool]:
    role = message.role
    content, has_media = _content(message)
    part_shapes: tuple[tuple[bool, bytes], ...] | None = None
    only_text = all(text is not None for text, _ in content)
    if not parts:
        texts = [f"<{extra['type']}>" if text is None else text for text, extra in content]
        leaves.append("\n".join(filter(None, texts)))  # vLLM skips empty ones
    elif role == "tool" and only_text:
        leaves.append("\n".join(text or "" for text, _ in content))
    else:
        part_shapes = tuple((text is not None, msgspec.json.encode(extra)) for text, extra in content)
        leaves += [text for text, _ in content if text is not None]
    reasoning = calls = None
    if role == "assistant":
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning is not None:
            leaves.append(_text(reasoning))
        calls = _outline_calls(message.tool_calls, name_first, leaves)
    tool_call_id = message.tool_call_id if role == "tool" else None
    if tool_call_id is not None:
        leaves.append(_text(tool_call_id))
    others = {key: value for key in ("name", "task") if isinstance(value := getattr(message, key), str)}
    if role == "developer":
        others["tools"] = _developer_tools(message.tools)
    shape = Shape(
        role, part_shapes, reasoning is not None, tool_call_id is not None, calls, msgspec.json.encode(others)
    )
    return shape, has_media


def _content(message: Message) -> tuple[list[_Part], bool]:
    """Return the message's parts, and whether there are media among them."""
    content = message.content
    parts: list[Any] = [] if content is None else [content] if isinstance(content, str) else content
    if message.role == "system":
        parts = _without_billing_header(parts)
    found: list[_Part] = []
    has_media = False
    for part in parts:
        if isinstance(part, str):
            found.append((part, {}))
            continue
        if not isinstance(part, dict):
            raise Unreadable("a content part is neither text nor an object")
        kind = part.get("type")
        others = {key: value for key, value in part.items() if key not in _PART_FIELDS}
        if isinstance(kind, str) and kind in _TEXT_PARTS and part.get("uuid") is None:
            text = part.get(_TEXT_PARTS[kind])
            if text is None and kind in ("text", "refusal"):
                continue  # vLLM skips these
            found.append((_text(text), others))
        elif (modality := _modality(part, kind)) is not None:
            found.append((None, {"type": modality, **others}))
            has_media = True
        else:
            raise Unreadable(f"content part of type {kind!r}")
    return found, has_media


def _modality(part: dict[str, Any], kind: Any) -> str | None:
    if isinstance(kind, str) and part.get("uuid") is None:
        return _MODALITIES.get(kind)
    return next((modality for field, modality in _MODALITIES.items() if field in part), None)


def _without_billing_header(parts: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if text is part else {**part, "text": rest})
    return kept


def _developer_tools(tools: Any) -> Any:
    """Return the tools of a developer message with their fields in the order into which vLLM's validation puts them."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Unreadable("tools of a developer message are not a list")
    ordered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise Unreadable("a tool that is not a function")
        for field, kinds in _FUNCTION_FIELDS.items():
            if field in function and not isinstance(function[field], kinds):
                raise Unreadable(f"a function whose {field} is {type(function[field]).__name__}")
        fields = {field: function[field] for field in _FUNCTION_FIELDS if field in function}
        ordered.append({"function": fields | function} | {key: tool[key] for key in tool if key != "function"})
    return ordered


def _outline_calls(calls: Any, name_first: bool, leaves: list[str]) -> tuple[tuple[bytes, bytes], ...] | None:
    if not calls:
        return None
    if not isinstance(calls, list):
        raise Unreadable("tool_calls is not a list")
    shapes = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type") != "function":
            raise Unreadable("a tool call that is not a function call")
        leaves += [_text(call.get("id")), _text(function.get("arguments")), _text(function.get("name"))]
        # the values of these two are leaves; their order is what matters
        of_function = dict.fromkeys(reversed(_CALL_FIELDS) if name_first else _CALL_FIELDS)
        of_function.update((key, value) for key, value in function.items() if key not in _CALL_FIELDS)
        of_call = {key: value for key, value in call.items() if key not in ("id", "function", "type")}
        shapes.append((msgspec.json.encode(of_function), msgspec.json.encode(of_call)))
    return tuple(shapes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"text expected, not {type(value).__name__}")
    return value


def build(shapes: Shapes, leaves: Iterator[Any], parts: bool, arguments: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Put message dictionaries together, with the keys in the order in which vLLM has them.

    Args:
        shapes: of the outline.
        leaves: of the outline; or stand-ins for them.
        parts: as in ``outline``.
        arguments: makes an object of a tool call's arguments.
    """
    return [
        {"role": shape, "content": _plain_content(shape, next(leaves), parts)}
        if isinstance(shape, str)
        else _build_one(shape, leaves, arguments)
        for shape in shapes
    ]


def _plain_content(role: str, text: Any, parts: bool) -> Any:
    return [{"type": "text", "text": text}] if parts and role != "tool" else text


def _build_one(shape: Shape, leaves: Iterator[Any], arguments: Callable[[Any], Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": shape.role}
    if shape.parts is None:
        message["content"] = next(leaves)
    else:
        message["content"] = [
            ({"type": "text", "text": next(leaves)} if is_text else {}) | msgspec.json.decode(others)
            for is_text, others in shape.parts
        ]
    reasoning = next(leaves) if shape.reasoning else None
    if shape.calls is not None:
        message["tool_calls"] = [_build_call(leaves, arguments, *others) for others in shape.calls]
    if shape.reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if shape.tool_call_id:
        message["tool_call_id"] = next(leaves)
    message.update(msgspec.json.decode(shape.others))
    return message


def _build_call(
    leaves: Iterator[Any], arguments: Callable[[Any], Any], of_function: bytes, of_call: bytes
) -> dict[str, Any]:
    call_id = next(leaves)
    function = {**msgspec.json.decode(of_function), "arguments": arguments(next(leaves)), "name": next(leaves)}
    return {"id": call_id, "function": function, "type": "function", **msgspec.json.decode(of_call)}


def parse_arguments(text: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object; what is not one becomes an empty one, as in vLLM.

    Raises:
        Unreadable: they hold a lone surrogate, which cannot be tokenized, or too many values to read meanwhile.
    """
    refuse_many_values(text.count(","))
    try:
        parsed = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(parsed, dict):
        return {}
    if "\\u" in text:
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unreadable("arguments of a tool call hold a lone surrogate") from None
    return parsed


def refuse_many_values(commas: int) -> None:
    """Raise ``Unreadable`` for JSON whose parsing would delay other streams, by the commas in it."""
    if commas > _MANY_COMMAS:
        raise Unreadable("JSON with more values than can be read without delaying others")


def developer_to_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without the developer role, for templates that do not know it.

    Developer messages become system ones; when a system message is then not the first, all are merged into one at the
    beginning. As ``_convert_developer_to_system`` and ``_consolidate_system_messages`` in vllm/renderers/hf.py.
    """
    converted = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [index for index, message in enumerate(converted) if message["role"] == "system"]
    if systems in ([], [0]):
        return converted
    texts = [text for index in systems if (text := _joined(converted[index]["content"]))]
    others = [message for message in converted if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined(content: Any) -> Any:
    return "\n".join(part["text"] for part in content if "text" in part) if isinstance(content, list) else content
