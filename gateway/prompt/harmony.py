"""Chats of gpt-oss, which vLLM renders with the Harmony library instead of the model's chat template.

As ``_make_request_with_harmony`` in vllm/renderers/online_renderer.py and vllm/entrypoints/openai/parser/
harmony_utils.py. The library writes what comes first: the system message and the tools. All other messages are texts
between control tokens, which the model's own tokenizer reads; so they are tokenized once, like those of other models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from gateway.prompt.anthropic import wants_system_first, with_system_first
from gateway.prompt.cache import ByteCache
from gateway.prompt.conversation import Unreadable
from gateway.prompt.plan import Pieces
from gateway.prompt.request import ABSENT, ChatRequest, Message, MessagesRequest
from gateway.prompt.segments import Segment
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokenizer import pack
from gateway.prompt.tools import parse_tools

try:
    import openai_harmony
except ImportError:  # the extra `harmony` is not installed
    openai_harmony = None

_EFFORTS: Final = ("low", "medium", "high")
_KNOWN_BYTES: Final = 16 * 2**20
_LONGEST_WITH_CONTROL_TOKENS: Final = 16_384  # the library holds up everything else while it encodes
_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_CONTROL: Final = "<|"


class Said(NamedTuple):
    """One Harmony message.

    Attributes:
        header: between the control tokens for start and message.
        texts: encoded one by one.
        end: the control token behind them.
    """

    header: str
    texts: Sequence[str]
    end: str = "<|end|>"


_FINAL: Final = "assistant<|channel|>final"
_ANALYSIS: Final = "assistant<|channel|>analysis"
_COMMENTARY: Final = "assistant<|channel|>commentary"


class HarmonyRenderer:
    """Renders the chats of one model; only where the library is there, see ``is_available``.

    Args:
        templates: the model's chat templates, by which vLLM decides where system messages of Anthropic requests go.
    """

    def __init__(self, templates: Iterable[ChatTemplate]) -> None:
        self._encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
        self._known: ByteCache[Any, Segment] = ByteCache(_KNOWN_BYTES)
        sources = [template.source for template in templates]
        self._system_first = not sources or any(map(wants_system_first, sources))

    @staticmethod
    def is_available() -> bool:
        """Return whether the library is installed."""
        return openai_harmony is not None

    def pieces(self, request: ChatRequest) -> list[Pieces | Segment]:
        """Return what the prompt consists of: segments, and texts that are to be tokenized.

        Raises:
            Unreadable: the engine would refuse the request.
        """
        messages = request.messages
        effort = request.reasoning_effort
        if isinstance(request, MessagesRequest):
            messages = with_system_first(messages) if self._system_first else messages
            effort = "low" if request.thinking_disabled else effort
        if effort is not None and effort not in _EFFORTS:
            raise Unreadable(f"reasoning effort {effort!r}")
        instructions = None
        if messages[0].role in ("system", "developer"):
            instructions, messages = _flat(messages[0].content), messages[1:]
        said = _without_old_thoughts(_conversation(messages))
        return [self._preamble(request, instructions, effort), *map(self._piece, said), f"{_START}assistant"]

    def _preamble(self, request: ChatRequest, instructions: str | None, effort: str | None) -> Segment:
        date = os.environ.get("VLLM_SYSTEM_START_DATE") or datetime.now().strftime("%Y-%m-%d")
        tools = b"" if request.tools is ABSENT else bytes(request.tools)
        key = (date, effort, instructions, tools, request.kind)
        known = self._known.get(key)
        if known is None:
            ids = self._encode_preamble(date, effort, instructions, parse_tools(tools, request.kind) or ())
            known = Segment(ids, 500 + 4 * len(instructions or "") + len(tools) + len(ids))
            self._known.put(key, known)
        return known

    def _encode_preamble(
        self, date: str, effort: str | None, instructions: str | None, tools: Sequence[dict[str, Any]]
    ) -> bytes:
        system = openai_harmony.SystemContent.new().with_conversation_start_date(date)
        if effort is not None:
            system = system.with_reasoning_effort(openai_harmony.ReasoningEffort[effort.upper()])
        messages = [openai_harmony.Message.from_role_and_content(openai_harmony.Role.SYSTEM, system)]
        if instructions or tools:
            developer = openai_harmony.DeveloperContent.new()
            if instructions is not None:
                developer = developer.with_instructions(instructions)
            if tools:
                developer = developer.with_function_tools([_described(tool["function"]) for tool in tools])
            messages.append(openai_harmony.Message.from_role_and_content(openai_harmony.Role.DEVELOPER, developer))
        return pack(self._encoding.render_conversation(openai_harmony.Conversation.from_messages(messages)))

    def _piece(self, said: Said) -> Pieces | Segment:
        if _CONTROL not in said.header.replace("<|channel|>", ""):
            before = f"{_START}{said.header}{_MESSAGE}"
            if len(said.texts) == 1 and _CONTROL not in said.texts[0]:
                return before, said.texts[0], said.end
            return self._spelled(before, said)
        raise Unreadable("a name holds a control token")

    def _spelled(self, before: str, said: Said) -> Segment:
        """Return a message in which control tokens are nothing but text, or whose texts are encoded one by one."""
        key = (before, tuple(said.texts))
        known = self._known.get(key)
        if known is None:
            size = sum(map(len, said.texts))
            if size > _LONGEST_WITH_CONTROL_TOKENS:
                raise Unreadable("a long text with control tokens")
            encode = self._encoding.encode
            ids = encode(before, allowed_special="all")
            for text in said.texts:
                ids += encode(text, disallowed_special=())
            ids += encode(said.end, allowed_special="all")
            known = Segment(pack(ids), 500 + 8 * size)
            self._known.put(key, known)
        return known


def _described(function: dict[str, Any]) -> Any:
    try:
        return openai_harmony.ToolDescription.new(
            name=function["name"], description=function["description"] or "", parameters=function["parameters"]
        )
    except ValueError as error:
        raise Unreadable(f"a tool: {error}") from None


def _conversation(messages: Sequence[Message]) -> list[Said]:
    names: dict[Any, Any] = {}
    for message in messages:
        names.update((call.get("id"), call["function"].get("name")) for call in _calls(message))
    return [said for message in messages for said in _said(message, names)]


def _said(message: Message, names: dict[Any, Any]) -> list[Said]:
    match message.role:
        case "user":
            return [Said("user", _texts(message.content))]
        case "system" | "developer":
            instructions = _flat(message.content)
            return [] if instructions is None else [Said("developer", [f"# Instructions\n\n{instructions}"])]
        case "tool":
            name = names.get(message.tool_call_id or "", "")
            return [Said(f"functions.{name}<|channel|>commentary to=assistant", [_flat(message.content) or ""])]
        case "assistant":
            return _said_by_assistant(message)
    raise Unreadable(f"a message of role {message.role!r}")


def _said_by_assistant(message: Message) -> list[Said]:
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    thoughts = [Said(_ANALYSIS, [_text(reasoning)])] if reasoning else []
    calls = _calls(message)
    if not calls:
        texts = _texts(message.content)
        return [*thoughts, Said(_FINAL, texts)] if texts and texts[0] else thoughts
    content = _flat(message.content)
    said = [Said(_COMMENTARY, [content]), *thoughts] if content else thoughts
    for call in calls:
        header = f"assistant to=functions.{call['function'].get('name')}<|channel|>commentary json"
        said.append(Said(header, [_text(call["function"].get("arguments") or "")], "<|call|>"))
    return said


def _without_old_thoughts(said: list[Said]) -> list[Said]:
    """Return the messages without thoughts before the last answer: the model is not shown them again."""
    last = max((index for index, one in enumerate(said) if one.header == _FINAL), default=0)
    return [one for index, one in enumerate(said) if index >= last or one.header != _ANALYSIS]


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise Unreadable("tool_calls")
    return calls


def _flat(content: str | list[Any] | None) -> str | None:
    """Return a content as one text, None where it holds none.

    Raises:
        Unreadable: parts are not all plain texts; vLLM may lose the others with them.
    """
    if content is None or isinstance(content, str):
        return content
    if not all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content):
        raise Unreadable("parts that are no texts")
    texts = [_text(part if isinstance(part, str) else part.get("text")) for part in content]
    return "".join(texts) if texts else None


def _texts(content: str | list[Any] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    if not all(isinstance(part, dict) for part in content):
        raise Unreadable("a content part is not an object")
    return [_text(part.get("text", "")) for part in content]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"text expected, not {type(value).__name__}")
    return value
