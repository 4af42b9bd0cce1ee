"""Draws up plans: renders a template with stand-ins for the texts, see ``plan``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from gateway.prompt.chat import Chat
from gateway.prompt.plan import METHODS, Arguments, Compute, Guard, Piece, Plan, Text, Untraceable, dumped, joined
from gateway.prompt.template import (
    RENDER_LIMIT_S,
    ChatTemplate,
    TemplateEnvironment,
    rendered_pieces,
    strftime_now,
)

# What Jinja's tests answer for any text, and for any object.
_OF_TEXT: Final = dict.fromkeys(("defined", "string", "iterable", "sequence"), True) | dict.fromkeys(
    ("undefined", "none", "mapping", "number", "integer", "float", "boolean", "true", "false", "callable"), False
)
_OF_ARGUMENTS: Final = _OF_TEXT | {"string": False, "mapping": True}
# These work through Python's operators alone, which stand-ins define or refuse.
_OPERATOR_TESTS: Final = frozenset({"eq", "==", "equalto", "ne", "!=", "in"})
_OPERATOR_FILTERS: Final = frozenset({"default", "d", "select", "reject", "selectattr", "rejectattr", "map"})
# These look at a container; what they do with its items, stand-ins define or refuse.
_CONTAINER_FILTERS: Final = frozenset({"list", "first", "last", "length", "count", "reverse", "items", "join"})


class TracingEnvironment(TemplateEnvironment):
    """The environment of chat templates, for stand-ins: whatever is not known to be sound raises ``Untraceable``."""

    def __init__(self) -> None:
        super().__init__(finalize=_put_out)
        self.guards: list[Guard] = []
        self.filters = {name: _traced_filter(name, made) for name, made in self.filters.items()}
        self.tests = {name: _traced_test(name, test) for name, test in self.tests.items()}
        self.globals["strftime_now"] = self._strftime_now
        del self.globals["lipsum"]  # random

    @staticmethod
    def concat(pieces: Iterable[str]) -> Any:
        """Join what a macro or block puts out; the result is a stand-in where a piece is one."""
        found = list(pieces)
        return joined(found) if any(isinstance(piece, Piece) for piece in found) else "".join(found)

    def concatenate(self, *values: Any) -> Any:
        """The operator ``~``."""
        if any(isinstance(value, Text) for value in values):
            return joined([value if isinstance(value, Text) else str(value) for value in values])
        return "".join(map(str, values))

    def compile_traced(self, source: str) -> jinja2.Template:
        """Compile a template so that ``~`` keeps stand-ins."""
        return self.from_string(_Concatenations(self).visit(self.parse_watched(source)))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Methods of texts that stand-ins have; else as always."""
        if isinstance(obj, Text):
            if attribute in METHODS:
                return getattr(obj, attribute)
            if hasattr(str, attribute):
                raise Untraceable(f"str.{attribute}")
            return self.undefined(obj="", name=attribute)
        if isinstance(obj, Arguments):
            raise Untraceable(f"arguments.{attribute}")
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Stand-ins have no items that could be known, and are no keys."""
        if isinstance(obj, (Text, Arguments)) or isinstance(argument, (Text, Arguments)):
            raise Untraceable("an item of a text")
        return super().getitem(obj, argument)

    def _strftime_now(self, pattern: str) -> str:
        now = strftime_now(pattern)
        self.guards.append((lambda leaves: strftime_now(pattern), now))
        return now


class _Concatenations(NodeTransformer):
    """Makes a call of ``TracingEnvironment.concatenate`` out of each ``~``."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor's protocol
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno).set_environment(self._environment)


def _put_out(value: Any) -> Any:
    return Piece.of(value) if isinstance(value, Text) else value


def _traced_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    special = {"trim": _trim, "tojson": dumped, "string": _string}.get(name)
    if special is not None:
        return special
    if name in _OPERATOR_FILTERS:
        return function

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (Text, Arguments)):
                raise Untraceable(f"filter {name} of a text")
            if name not in _CONTAINER_FILTERS and not _is_plain(value):
                raise Untraceable(f"filter {name} of {type(value).__name__}")
        return function(*args, **kwargs)

    return traced


def _traced_test(name: str, function: Any) -> Any:
    if name in _OPERATOR_TESTS:
        return function

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        if not any(isinstance(value, (Text, Arguments)) for value in args):
            return function(*args)
        answers = _OF_TEXT if isinstance(args[0], Text) else _OF_ARGUMENTS
        if len(args) > 1 or name not in answers:
            raise Untraceable(f"test {name} of a text")
        return answers[name]

    return traced


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(
        value, (str, int, float, jinja2.Undefined, jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)
    )


def _trim(value: Any, chars: str | None = None) -> Any:
    return value.strip(chars) if isinstance(value, (str, Text)) else str(value).strip(chars)


def _string(value: Any) -> Any:
    return value if isinstance(value, (str, Text)) else str(value)


class PlanDrafter:
    """Draws up plans for one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._environment = TracingEnvironment()
        self._traced = self._environment.compile_traced(template.source)

    def draft(self, chat: Chat, text: str) -> Plan | None:
        """Return a plan for conversations of the shape of ``chat``, or None if there cannot be one.

        Args:
            chat: an example; without ``continue_final_message``.
            text: the example as the template renders it.
        """
        guards: list[Guard] = []
        self._environment.guards = guards
        leaves = [Text(leaf, itemgetter(index), guards) for index, leaf in enumerate(chat.leaves)]
        try:
            messages = self._template.messages(chat.shapes, iter(leaves), Arguments)
            context = self._traced.new_context(self._template.variables(chat, messages))
            deadline = self._environment.deadline = time.monotonic() + RENDER_LIMIT_S
            pieces = rendered_pieces(self._traced, context, deadline)
        except Exception:  # whatever stand-ins cannot do, Python and Jinja report in their own ways
            return None
        for leaf in leaves:
            leaf.value = ""  # computations may hold on to a stand-in; they need not hold on to the example's texts
        plan = Plan(guards, _merged(pieces))
        return plan if plan.serves(chat.leaves) and plan.render(chat.leaves) == text else None


def _merged(pieces: Iterable[str]) -> list[str | Compute]:
    """Flatten pieces, and join neighbouring constants."""
    parts: list[str | Compute] = []
    for piece in pieces:
        for part in piece.text.parts if isinstance(piece, Piece) else (piece,):
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
    return parts
