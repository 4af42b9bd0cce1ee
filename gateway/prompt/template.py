"""Chat templates, rendered as ``transformers`` renders them and fed as vLLM feeds them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import BuiltinMethodType
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

from gateway.prompt.chat import Chat
from gateway.prompt.content_format import takes_parts
from gateway.prompt.conversation import Shapes, build, developer_to_system, parse_arguments

RENDER_LIMIT_S: Final = 5.0
RENDER_LIMIT_CHARS: Final = 64 * 2**20
_PIECES_BETWEEN_CHECKS: Final = 1024
_ITEMS_BETWEEN_CHECKS: Final = 64
_CONTINUE_HERE: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))


class TemplateError(Exception):
    """A template that cannot be compiled, or that refused or failed to render a conversation."""


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, which marks assistant text for training, renders its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Replace the tag by its body, in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of ``transformers``' ``apply_chat_template``, with a deadline.

    ``getattr`` and ``is_safe_callable`` give the sandbox's answers sooner for what templates do most.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols], **options
        )
        self.deadline = 0.0
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = strftime_now

    def parse_watched(self, source: str) -> jinja2.nodes.Template:
        """Parse a template such that its loops end at the deadline."""
        return _WatchedLoops(self).visit(self.parse(source))  # type: ignore[no-any-return]

    def watched(self, items: Any) -> Any:
        """Return what a loop goes over; where that is long, it watches the time."""
        if isinstance(items, (list, tuple, dict, str)) and len(items) <= _ITEMS_BETWEEN_CHECKS:
            return items
        return self._until_deadline(items)

    def _until_deadline(self, items: Any) -> Iterator[Any]:
        for index, item in enumerate(items):
            if index % _ITEMS_BETWEEN_CHECKS == 0:
                self.check_time()
            yield item

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply and raise to powers; one such operation can take all memory, or for ever."""
        if _product_size(operator, left, right) > RENDER_LIMIT_CHARS:
            raise TemplateError(f"the chat template makes a value of more than {RENDER_LIMIT_CHARS} characters")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up ``obj.attribute``; message dictionaries are by far the most frequent ``obj``."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, self)
            return self.undefined(obj=obj, name=attribute) if value is self else value
        return super().getattr(obj, attribute)

    def is_safe_callable(self, obj: Any) -> bool:
        """Whether a template may call ``obj``; methods of built-in types cannot carry the marks that forbid it.

        Asked before every call that a template makes, which is a place to watch the time; loops are the other one.
        """
        self.check_time()
        return type(obj) is BuiltinMethodType or super().is_safe_callable(obj)

    def check_time(self) -> None:
        """Raise ``TemplateError`` behind the deadline."""
        if time.monotonic() > self.deadline:
            raise TemplateError(f"the chat template took longer than {RENDER_LIMIT_S:g} s")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter of chat templates: Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _WatchedLoops(NodeTransformer):
    """Puts what each loop goes over through ``TemplateEnvironment.watched``."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - the visitor's protocol
        self.generic_visit(node)
        watched = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("watched"), [node.iter], [], None, None)
        node.iter = watched.set_lineno(node.lineno).set_environment(self._environment)
        return node


def _product_size(operator: str, left: Any, right: Any) -> float:
    """Return how many characters, items or bits a product or power has, roughly; 0 where it cannot be large."""
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, (str, list, tuple)) and isinstance(right, int) else 0


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The function of chat templates that tells the date, local time as in the engine."""
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja text.
        special_tokens: ``bos_token``, ``eos_token`` … of the tokenizer; templates read them as variables.

    Raises:
        TemplateError: the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._environment = TemplateEnvironment()
        try:
            self.parts = takes_parts(self._environment.parse(source))
            self._template = self._environment.from_string(self._environment.parse_watched(source))
            source.encode()
        except Exception as error:  # Jinja and Python refuse what is no template in their own ways
            raise TemplateError(f"the chat template is not valid: {error}") from None
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, chat: Chat) -> str:
        """Return the text that the engine would tokenize.

        Raises:
            TemplateError: the template raises, for instance because roles do not alternate, or exceeds its bounds.
        """
        messages = self.messages(chat.shapes, iter(chat.leaves))
        final = _mark_final(messages, self.source) if chat.continue_final_message else None
        text = "".join(self._pieces(self.variables(chat, messages)))
        return text if final is None else _cut_after_final(text, final)

    def messages(
        self, shapes: Shapes, leaves: Iterator[Any], arguments: Callable[[Any], Any] = parse_arguments
    ) -> list[dict[str, Any]]:
        """Return the messages as this template gets them; see ``conversation.build``."""
        messages = build(shapes, leaves, self.parts, arguments)
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            return developer_to_system(messages)
        return messages

    def variables(self, chat: Chat, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return all variables that the template sees."""
        return {
            **self.special_tokens,
            "documents": None,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def _pieces(self, variables: dict[str, Any]) -> list[str]:
        self._environment.deadline = time.monotonic() + RENDER_LIMIT_S
        context = self._template.new_context(variables)
        return rendered_pieces(self._template, context, self._environment.deadline)


def rendered_pieces(template: jinja2.Template, context: jinja2.runtime.Context, deadline: float) -> list[str]:
    """Return what a template puts out, piece by piece.

    Raises:
        TemplateError: it fails, or exceeds its bounds of time or size.
    """
    pieces: list[str] = []
    size = 0
    try:
        output = template.root_render_func(context)
        while batch := list(islice(output, _PIECES_BETWEEN_CHECKS)):
            pieces += batch
            size += sum(map(len, batch))
            if size > RENDER_LIMIT_CHARS:
                raise TemplateError(f"the chat template puts out more than {RENDER_LIMIT_CHARS} characters")
            if len(batch) == _PIECES_BETWEEN_CHECKS and time.monotonic() > deadline:
                raise TemplateError(f"the chat template took longer than {RENDER_LIMIT_S:g} s")
    except TemplateError:
        raise
    except Exception as error:  # a template is a program: it can raise anything
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    return pieces


def _mark_final(messages: list[dict[str, Any]], source: str) -> str:
    """Put a mark at the end of the last message's text, and return that text; as ``render_jinja_template`` does."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        part = next((part for part in reversed(content) if "text" in part), None)
        if part is None:
            raise TemplateError("continue_final_message is set, but the final message holds no text")
        final: str = part["text"]
        part["text"] = final + _CONTINUE_HERE
    elif isinstance(content, str) and "content" in source:
        final = content
        messages[-1]["content"] = final + _CONTINUE_HERE
    else:
        raise TemplateError("continue_final_message is set, but there is nothing to continue")
    return final


def _cut_after_final(text: str, final: str) -> str:
    mark = _CONTINUE_HERE.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise TemplateError("continue_final_message is set, but the template changes the final message")
    if text.startswith(_CONTINUE_HERE, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims the message, and so do we


def load_templates(
    directory: Path, config: Mapping[str, Any], override: Path | None, special_tokens: Mapping[str, str]
) -> tuple[ChatTemplate, ChatTemplate] | None:
    """Find and compile a model's chat templates.

    Args:
        directory: where the tokenizer lies.
        config: its ``tokenizer_config.json``.
        override: a template to use instead of the model's own.
        special_tokens: of the tokenizer.

    Returns:
        The template for requests without tools and the one for requests with tools; None if the model has none.

    Raises:
        TemplateError: a template cannot be read or is not valid.
    """
    sources = {"default": _read(override)} if override is not None else _own_sources(directory, config)
    if "default" not in sources:
        return None
    default = ChatTemplate(sources["default"], special_tokens)
    with_tools = sources.get("tool_use")
    return default, default if with_tools is None else ChatTemplate(with_tools, special_tokens)


def _own_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a model's templates by name; files win over the configuration, as in ``transformers``."""
    sources = {file.stem: _read(file) for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        sources["default"] = _read(directory / "chat_template.jinja")
    if sources:
        return sources
    own = config.get("chat_template")
    file = directory / "chat_template.json"
    try:
        if own is None and file.is_file():
            own = json.loads(_read(file))["chat_template"]
        return {"default": own} if isinstance(own, str) else {one["name"]: one["template"] for one in own or ()}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise TemplateError(f"{directory}: the chat template is neither a text nor a list of named texts") from None


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{file}: cannot be read: {error}") from None
