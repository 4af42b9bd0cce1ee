"""Plans: what a template does with conversations of one shape, found out once and then done without the template.

A plan is drawn up by rendering a conversation whose texts are replaced by ``Text`` stand-ins. A stand-in can be put
out, joined, stripped and split; what results is another stand-in that knows how to compute itself from the leaves of
any conversation. When the template asks a question about a text (is it empty, does it contain ``</think>``?), it gets
the answer for this conversation, and the question becomes a *guard* of the plan: the plan serves another conversation
of this shape only if all guards have the same answers there.

Why a plan cannot be wrong: a stand-in is not a ``str``, so nothing can look into it behind our back. Every operation
that is not defined here raises (a ``TypeError`` of Python, or ``Untraceable``), and then there is no plan and the
template renders each such conversation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from gateway.prompt.conversation import parse_arguments
from gateway.prompt.template import to_json

Leaves = Sequence[str]
Compute = Callable[[Leaves], Any]
Guard = tuple[Compute, Any]
Pieces = str | tuple[str, ...]
"""A text, or what it is joined from."""
Recipe = str | Callable[[Leaves], Pieces]


class Untraceable(Exception):
    """The template did something with a text that a plan cannot express."""


class Plan:
    """Output of a template for conversations of one shape.

    Attributes:
        guards: questions and the answers on which the plan rests.
        parts: constant texts, and computations of the others from the leaves; joined they are the rendered text.
    """

    __slots__ = ("guards", "parts")

    def __init__(self, guards: list[Guard], parts: list[str | Compute]) -> None:
        self.guards = guards
        self.parts = parts

    def serves(self, leaves: Leaves) -> bool:
        """Return whether the plan holds for a conversation with these leaves."""
        # in order and no further than the first other answer: later questions may make no sense then
        return not self.guards or all(question(leaves) == answer for question, answer in self.guards)

    def render(self, leaves: Leaves) -> str:
        """Return the rendered text; only for leaves that the plan serves."""
        return computed(self.parts, leaves)

    def recipes(self, starts: Callable[[str], list[int]]) -> list[Recipe]:
        """Return how to make each segment of the rendered text: a constant, or a computation of it or of its pieces.

        A message is left in pieces: copying and hashing it anew would cost more than all the rest for it.

        Args:
            starts: finds the positions in a constant at which segments begin.
        """
        segments: list[list[str | Compute]] = [[]]
        for part in self.parts:
            if not isinstance(part, str):
                segments[-1].append(part)
                continue
            cuts = starts(part)
            segments[-1].append(part[: cuts[0]] if cuts else part)
            segments += [[part[start:end]] for start, end in pairwise([*cuts, len(part)])]
        return [_recipe([part for part in segment if part != ""]) for segment in segments if any(segment)]


def _recipe(parts: list[str | Compute]) -> Recipe:
    match parts:
        case [str(constant)]:
            return constant
        case [str(before), compute, str(after)] if not isinstance(compute, str):  # a message, usually
            return lambda leaves: (before, compute(leaves), after)
    return lambda leaves: computed(parts, leaves)


class Text:
    """Stand-in for a text of the conversation, or for one made from such texts.

    Attributes:
        value: the text in the conversation that the plan is drawn up with.
        compute: makes the text from the leaves of any conversation that the plan serves.
        guards: of the plan; questions are added as they are asked.
        parts: constants and computations that make up the text.
    """

    __slots__ = ("compute", "guards", "parts", "value")

    def __init__(
        self, value: str, compute: Compute, guards: list[Guard], parts: Sequence[str | Compute] | None = None
    ) -> None:
        self.value = value
        self.compute = compute
        self.guards = guards
        self.parts = parts or (compute,)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise Untraceable("a text was converted")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        raise Untraceable("a text was formatted")

    def __bool__(self) -> bool:
        compute = self.compute
        return bool(self._ask(lambda leaves: bool(compute(leaves)), bool(self.value)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (str, Text)):
            return False
        left, right = self.compute, _compute_of(other)
        return bool(self._ask(lambda leaves: left(leaves) == right(leaves), self.value == _value_of(other)))

    def __contains__(self, other: object) -> bool:
        if not isinstance(other, (str, Text)):
            raise TypeError("a text contains texts only")
        outer, inner = self.compute, _compute_of(other)
        return bool(self._ask(lambda leaves: inner(leaves) in outer(leaves), _value_of(other) in self.value))

    def __add__(self, other: object) -> Text:
        return joined([self, other])

    def __radd__(self, other: object) -> Text:
        return joined([other, self])

    def _ask(self, question: Compute, answer: Any) -> Any:
        self.guards.append((question, answer))
        return answer

    def _derive(self, method: str, *args: Any) -> Text:
        _only_plain(args)
        compute = self.compute
        return Text(
            getattr(self.value, method)(*args), lambda leaves: getattr(compute(leaves), method)(*args), self.guards
        )

    def strip(self, chars: str | None = None) -> Text:
        """As ``str.strip``."""
        return self._derive("strip", chars)

    def lstrip(self, chars: str | None = None) -> Text:
        """As ``str.lstrip``."""
        return self._derive("lstrip", chars)

    def rstrip(self, chars: str | None = None) -> Text:
        """As ``str.rstrip``."""
        return self._derive("rstrip", chars)

    def replace(self, old: str, new: str) -> Text:
        """As ``str.replace``."""
        return self._derive("replace", old, new)

    def startswith(self, prefix: str) -> bool:
        """As ``str.startswith``."""
        _only_plain((prefix,))
        compute = self.compute
        return bool(self._ask(lambda leaves: compute(leaves).startswith(prefix), self.value.startswith(prefix)))

    def endswith(self, suffix: str) -> bool:
        """As ``str.endswith``."""
        _only_plain((suffix,))
        compute = self.compute
        return bool(self._ask(lambda leaves: compute(leaves).endswith(suffix), self.value.endswith(suffix)))

    def split(self, separator: str, limit: int = -1) -> list[Text]:
        """As ``str.split``; the number of parts becomes a guard."""
        _only_plain((separator, limit))
        compute = self.compute
        values = self.value.split(separator, limit)
        self._ask(lambda leaves: len(compute(leaves).split(separator, limit)), len(values))

        def part(index: int) -> Compute:
            return lambda leaves: compute(leaves).split(separator, limit)[index]

        return [Text(value, part(index), self.guards) for index, value in enumerate(values)]


METHODS: Final = frozenset({"strip", "lstrip", "rstrip", "replace", "startswith", "endswith", "split"})


class Arguments:
    """Stand-in for the arguments of a tool call, an object; templates may ask for nothing but its JSON."""

    __slots__ = ("text",)

    def __init__(self, text: Text) -> None:
        self.text = text

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise Untraceable("arguments were converted")

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise Untraceable("arguments were tested")

    def __eq__(self, other: object) -> bool:
        raise Untraceable("arguments were compared")


class Piece(str):
    """What a template puts out in place of a stand-in: a ``str`` to Jinja, the stand-in to ``joined``."""

    text: Text

    @classmethod
    def of(cls, text: Text) -> Piece:
        """Return the piece for a stand-in; as a ``str`` it is empty."""
        piece = cls()
        piece.text = text
        return piece

    def __str__(self) -> str:
        return self


def joined(values: Iterable[object]) -> Text:
    """Return the concatenation of texts and stand-ins, at least one of which is a stand-in."""
    texts: list[str | Text] = []
    for value in values:
        text = value.text if isinstance(value, Piece) else value
        if not isinstance(text, (str, Text)):
            raise TypeError(f"a text cannot be joined with {type(text).__name__}")
        texts.append(text)
    parts = [part for text in texts for part in ((text,) if isinstance(text, str) else text.parts)]
    guards = next(text.guards for text in texts if isinstance(text, Text))
    return Text("".join(map(_value_of, texts)), lambda leaves: computed(parts, leaves), guards, parts)


def whole(text: Pieces) -> str:
    """Return a text in one piece."""
    return text if isinstance(text, str) else "".join(text)


def computed(parts: Iterable[str | Compute], leaves: Leaves) -> str:
    """Return the text that the parts make up."""
    return "".join([part if isinstance(part, str) else part(leaves) for part in parts])


def dumped(value: Any, **options: Any) -> Any:
    """The ``tojson`` filter, for values that may hold stand-ins."""
    found: list[Text] = []

    def of_this_conversation(text: Text) -> str:
        found.append(text)
        return text.value

    def dump(leaves: Leaves) -> str:
        return to_json(_resolved(value, lambda text: str(text.compute(leaves))), **options)

    example = to_json(_resolved(value, of_this_conversation), **options)
    return Text(example, dump, found[0].guards) if found else example


def _resolved(value: Any, text_of: Callable[[Text], str]) -> Any:
    """Return a copy of ``value`` with texts in place of stand-ins."""
    if isinstance(value, Text):
        return text_of(value)
    if isinstance(value, Arguments):
        return parse_arguments(text_of(value.text))
    if isinstance(value, dict):
        return {key: _resolved(item, text_of) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(item, text_of) for item in value]
    return value


def _value_of(text: str | Text) -> str:
    return text if isinstance(text, str) else text.value


def _compute_of(text: str | Text) -> Compute:
    return (lambda leaves: text) if isinstance(text, str) else text.compute


def _only_plain(values: Iterable[Any]) -> None:
    if not all(value is None or type(value) in (str, int, bool) for value in values):
        raise Untraceable("a method was called with something other than constants")
