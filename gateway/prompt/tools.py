"""Tool definitions of every API, as vLLM hands them to chat templates (``ChatCompletionToolsParam.model_dump``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.prompt.conversation import Unreadable, refuse_many_values

NAMESPACE_SEPARATOR: Final = "__"

Tools = list[dict[str, Any]]

_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What the one argument of a custom tool, which takes any text, is declared as."""


def decode_raw(raw: bytes) -> Any:
    """Return the value of a raw field, None where it is absent.

    Raises:
        Unreadable: it is nested too deeply, not Unicode, or has too many values to read meanwhile.
    """
    if not raw:
        return None
    refuse_many_values(raw.count(b","))
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None


def parse_tools(raw: bytes, kind: str = "chat") -> Tools | None:
    """Return the tools that the template gets, None for none.

    Args:
        raw: JSON of the field ``tools``; empty when it is absent.
        kind: of the request, which decides how tools are written down.

    Raises:
        Unreadable: an engine would refuse them.
    """
    tools = decode_raw(raw)
    if tools is None:
        return None
    if not isinstance(tools, list) or (kind == "chat" and not tools):
        raise Unreadable("tools must be a list that is not empty")
    return _DIALECTS[kind](tools)


def _of_chat(tools: list[Any]) -> Tools:
    return [_dump(tool) for tool in tools]


def _dump(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise Unreadable("a tool that is not a function")
    deferred = _flag(tool, "defer_loading")
    if deferred is None:
        return _function(function)
    if function.get("defer_loading") is None:
        function = {**function, "defer_loading": deferred}
    return {**_function(function), "defer_loading": deferred}


def _function(function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise Unreadable("a tool without a name")
    dumped = {key: function.get(key) for key in ("name", "description", "parameters")}
    for key in ("strict", "defer_loading"):
        if (flag := _flag(function, key)) is not None:
            dumped[key] = flag
    return {"type": "function", "function": dumped}


def _flag(fields: dict[str, Any], key: str) -> bool | None:
    flag = fields.get(key)
    if flag is not None and not isinstance(flag, bool):  # vLLM takes 1, "yes" and their like for true
        raise Unreadable(f"a tool whose {key} is {type(flag).__name__}")
    return flag


def _of_messages(tools: list[Any]) -> Tools:
    dumped = []
    for tool in tools:
        schema = tool.get("input_schema") if isinstance(tool, dict) else None
        if not isinstance(schema, dict):
            raise Unreadable("a tool without input_schema")
        dumped.append(_function({**tool, "parameters": schema if "type" in schema else {**schema, "type": "object"}}))
    return dumped


def _of_responses(tools: list[Any]) -> Tools:
    """As ``get_function_tools`` in vllm/tool_parsers/utils.py: built-in tools are not told to the model."""
    dumped = []
    for tool in tools:
        if not isinstance(tool, dict):
            raise Unreadable("a tool is not an object")
        match tool.get("type"):
            case "function":
                dumped.append(_function(tool))
            case "custom":
                shown = {key: tool.get(key) for key in ("name", "description")}
                dumped.append(_function({**shown, "parameters": _CUSTOM_PARAMETERS}))
            case "namespace":
                dumped += _of_namespace(tool)
    return dumped


def _of_namespace(namespace: dict[str, Any]) -> Tools:
    tools = namespace.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unreadable("a namespace without tools")
    return [
        _function({**tool, "name": f"{namespace.get('name')}{NAMESPACE_SEPARATOR}{tool.get('name')}"})
        for tool in tools
        if tool.get("type") == "function"
    ]


_DIALECTS: Final[dict[str, Callable[[list[Any]], Tools]]] = {
    "chat": _of_chat,
    "messages": _of_messages,
    "responses": _of_responses,
}
