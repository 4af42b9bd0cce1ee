"""What a load test sends: requests with text, in conversations or alone, in the order in which they are due.

A scenario is traffic of ``sim.scenario`` (a generator by name, or the path of a trace) with its blocks written out as
text, or ``code``: coding agents with text of their own (``sim.workload``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec

from sim.generators import Count, Positive
from sim.load.text import MAX_BLOCK_WORDS, WORD_CHARS, prompt_text
from sim.requests import SimRequest, Trace
from sim.scenario import Traffic
from sim.workload import Session, coding_agents

LOOPS: Final = ("closed", "sessions", "open")
API_PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CODE: Final = "code"
_TAIL: Final = 1 << 62  # ids of text that the trace does not name
_TAIL_BLOCKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        number: position in the scenario.
        think_s: seconds from the answer before to this request, in a conversation.
    """

    number: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Unit:
    """What one user does at a stretch: a conversation whose turns wait for each other, or a single request.

    Attributes:
        due_s: when it begins, in seconds after the test did.
    """

    due_s: float
    turns: tuple[Turn, ...]


class Scenario(Protocol):
    """A scenario, ready to be sent.

    Attributes:
        name: what reports call it.
        units: by ``due_s``.
        paced: whether units begin when they are due, not when a user is free.
    """

    name: str
    units: Sequence[Unit]
    paced: bool

    def request(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request, without model and stream options."""
        ...


class TraceScenario:
    """A trace whose blocks are text.

    Args:
        trace: the requests.
        loop: see ``read_scenario``.
        api: the endpoint that is asked. In chats, what earlier turns asked and were answered are messages of their own;
            answers are those of the trace, so that every target is sent the same bytes.
    """

    def __init__(self, trace: Trace, loop: str, api: str) -> None:
        if trace.block_tokens > MAX_BLOCK_WORDS:
            raise ValueError(
                f"{trace.name}: blocks of {trace.block_tokens} tokens; at most {MAX_BLOCK_WORDS} can be told"
            )
        loop = loop or ("closed" if trace.closed_loop else "open")
        self.name = trace.name
        self.paced = loop != "closed"
        self._trace = trace
        self._api = api
        self._before = _turns_before(trace)
        self._last = _last_turns(self._before)
        self.units: Sequence[Unit] = _singles(trace) if loop == "open" else _conversations(trace)

    def request(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request; see ``Scenario``."""
        request = self._trace.requests[number]
        block_tokens = self._trace.block_tokens
        # A block that is not full yet has the name that a later turn gives it.
        blocks = self._trace.requests[self._last[number]].chunks[: -(-request.prompt_tokens // block_tokens)]
        tail = _TAIL + self._last[number] * _TAIL_BLOCKS
        text = prompt_text(blocks, block_tokens, tail, request.prompt_tokens)
        body: dict[str, Any] = {"max_tokens": request.output_tokens, "temperature": 0}
        if self._api == "completions":
            return API_PATHS["completions"], {"prompt": text, **body}
        return API_PATHS["chat"], {"messages": self._messages(number, text), **body}

    def _messages(self, number: int, text: str) -> list[dict[str, str]]:
        """Return the text as messages, cut where earlier turns of the conversation asked and were answered."""
        cuts: list[int] = []
        before = self._before[number]
        while before is not None:
            earlier = self._trace.requests[before]
            cuts += [earlier.prompt_tokens + earlier.output_tokens, earlier.prompt_tokens]
            before = self._before[before]
        ends = [cut * WORD_CHARS for cut in reversed(cuts)] + [len(text)]
        starts = [0, *ends[:-1]]
        roles = ("user", "assistant")
        return [
            {"role": roles[position % 2], "content": text[start:end].rstrip()}
            for position, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]


def _turns_before(trace: Trace) -> list[int | None]:
    """Return for each request the earlier one whose prompt and answer it begins with."""
    latest: dict[str, int] = {}
    before: list[int | None] = []
    for number, request in enumerate(trace.requests):
        previous = latest.get(request.session) if request.session is not None else None
        before.append(previous if previous is not None and _goes_on(trace, previous, request) else None)
        if request.session is not None:
            latest[request.session] = number
    return before


def _last_turns(before: Sequence[int | None]) -> list[int]:
    """Return for each request the last one that goes on with its conversation."""
    last = list(range(len(before)))
    for number in reversed(range(len(before))):
        if (earlier := before[number]) is not None:
            last[earlier] = last[number]
    return last


def _goes_on(trace: Trace, number: int, request: SimRequest) -> bool:
    earlier = trace.requests[number]
    spoken = earlier.prompt_tokens + earlier.output_tokens
    whole = min(len(earlier.chunks), spoken // trace.block_tokens)
    return request.prompt_tokens > spoken and list(request.chunks[:whole]) == list(earlier.chunks[:whole])


def _singles(trace: Trace) -> list[Unit]:
    return [Unit(request.arrival_s, (Turn(number, 0.0),)) for number, request in enumerate(trace.requests)]


def _conversations(trace: Trace) -> list[Unit]:
    groups: dict[str | int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        groups.setdefault(number if request.session is None else request.session, []).append(number)
    units = []
    for numbers in groups.values():
        turns = tuple(
            Turn(number, trace.requests[number].think_s if position else 0.0) for position, number in enumerate(numbers)
        )
        units.append(Unit(trace.requests[numbers[0]].arrival_s, turns))
    return units


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``code``.

    Attributes:
        sessions: agents.
        turns: requests of each.
        output_tokens: length of every answer.
        think_s: mean pause before a turn.
        lines: lines that a tool answers with.
    """

    sessions: Count = 32
    turns: Count = 10
    output_tokens: Count = 48
    think_s: Positive = 1.0
    lines: Count = 28


class CodeScenario:
    """Coding agents in three teams: files, searches and test runs as text; chats only.

    Args:
        settings: how many, and how long.
        seed: of the text.
        loop: ``sessions`` or ``closed``.
        load: times as fast.
        first: so many requests of those that begin first, 0 for all.
    """

    def __init__(self, settings: Code, seed: int, loop: str, load: float, first: int) -> None:
        self.name = CODE
        self.paced = loop == "sessions"
        sessions = coding_agents(
            settings.sessions, settings.turns, seed, settings.output_tokens, settings.think_s, settings.lines
        )
        self._turns = [turn for session in sessions for turn in session.turns]
        units = sorted(_text_units(sessions, load), key=lambda unit: unit.due_s)
        self.units: Sequence[Unit] = _first(units, first) if first else units

    def request(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request; see ``Scenario``."""
        turn = self._turns[number]
        return turn.path, turn.body


def _text_units(sessions: Sequence[Session], load: float) -> list[Unit]:
    units, number = [], 0
    for session in sessions:
        pauses = [turn.think_s / load for turn in session.turns]
        turns = tuple(Turn(number + position, pause if position else 0.0) for position, pause in enumerate(pauses))
        units.append(Unit(pauses[0], turns))
        number += len(turns)
    return units


def _first(units: Sequence[Unit], requests: int) -> list[Unit]:
    kept = []
    for unit in units:
        kept.append(replace(unit, turns=unit.turns[:requests]))
        requests -= len(kept[-1].turns)
        if not requests:
            break
    return kept


def ramp_loop(loop: str) -> str:
    """Return the loop of a ramp: only in a closed one do more users send more.

    Raises:
        ValueError: another one is wanted.
    """
    if loop not in ("", "closed"):
        raise ValueError(f"a ramp is in a closed loop, where more users send more; leave out --loop {loop}")
    return "closed"


def read_scenario(
    source: str, seed: int = 0, loop: str = "", api: str = "chat", load: float = 1.0, first: int = 0
) -> Scenario:
    """Read or make a scenario.

    Args:
        source: ``code`` or ``code:key=value,…``, or what ``sim.scenario.Traffic`` knows.
        seed: of everything that is drawn by chance.
        loop: ``closed``: a user plays one conversation after another; ``sessions``: conversations begin when the trace
            says; ``open``: every request is sent when the trace says, whether or not those before were answered.
            Empty: ``closed`` where the source has conversations, else ``open``.
        api: ``chat`` or ``completions``, see ``TraceScenario``.
        load: times as many requests per second.
        first: so many requests, 0 for all.

    Raises:
        ValueError: there is no such scenario, or not in this loop or for this endpoint.
    """
    if loop and loop not in LOOPS:
        raise ValueError(f"there is no loop {loop!r}; choose {', '.join(LOOPS)}")
    if api not in API_PATHS:
        raise ValueError(f"there is no API {api!r}; choose {', '.join(API_PATHS)}")
    if not 0 < load < float("inf"):
        raise ValueError(f"load must be above 0 and finite, not {load}")
    name, _, words = source.partition(":")
    if name == CODE:
        return _code(words, seed, loop, api, load, first)
    trace = Traffic(source, load=load, first=first).trace(seed)
    trace.check()
    return TraceScenario(trace, loop, api)


def _code(words: str, seed: int, loop: str, api: str, load: float, first: int) -> CodeScenario:
    if loop == "open" or api != "chat":
        raise ValueError(f"{CODE}: its turns are chats that wait for each other; take another scenario for this")
    pairs = dict(pair.partition("=")[::2] for pair in words.split(",") if pair)
    try:
        settings = msgspec.convert(pairs, Code, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{CODE}: {error}. Keys: {', '.join(Code.__struct_fields__)}.") from None
    return CodeScenario(settings, seed, loop, load, first)
