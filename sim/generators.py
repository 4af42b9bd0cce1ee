"""Traffic made to measure: deterministic by seed, known by name in ``kvway sim`` (``chat:sessions=500,think_s=20``).

Texts are counts of tokens and ids of blocks. Lengths are log-normal around their means, pauses exponential, popularity
follows Zipf's law. A conversation's next prompt begins with the last one and its answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, count
from types import MappingProxyType
from typing import Annotated, Final, Protocol

import msgspec

from sim.requests import MOST_REQUESTS, SimRequest, Trace

BLOCK_TOKENS: Final = 256
_SPREAD: Final = 0.6  # sigma of log-normal lengths
_TOKEN_S: Final = 0.03  # nominal time between tokens, for the arrivals of later turns in an open loop

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Exponent = Annotated[float, msgspec.Meta(ge=0, le=10)]


@dataclass(slots=True)
class _Text:
    """A text so far: its length and the ids of its whole blocks; new ids come from ``fresh``."""

    fresh: Iterator[int]
    tokens: int = 0
    ids: tuple[int, ...] = ()

    def grown(self, tokens: int) -> _Text:
        """Return this text with ``tokens`` new ones behind it."""
        total = self.tokens + tokens
        new = (next(self.fresh) for _ in range(total // BLOCK_TOKENS - len(self.ids)))
        return _Text(self.fresh, total, (*self.ids, *new))


class Generator(Protocol):
    """Settings of a kind of traffic."""

    def trace(self, seed: int = 0) -> Trace:
        """Make the traffic; the same seed makes the same."""
        ...


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the generators."""


class Chat(_Struct, frozen=True):
    """Conversations between people and one assistant: the system prompt is everybody's, the rest is their own.

    Attributes:
        sessions: conversations.
        rate: conversations that begin per second, at random.
        turns: requests of a conversation, on average (geometric).
        system_tokens: length of the system prompt.
        message_tokens: length of a message, on average.
        output_tokens: length of an answer, on average.
        think_s: pause before the next message, on average.
    """

    sessions: Count = 400
    rate: Positive = 1.0
    turns: Count = 6
    system_tokens: Count = 512
    message_tokens: Count = 200
    output_tokens: Count = 250
    think_s: Positive = 30.0

    def trace(self, seed: int = 0) -> Trace:
        """Make the conversations; see ``Generator``."""
        rng = random.Random(seed)
        requests: list[SimRequest] = []
        system = _Text(count()).grown(self.system_tokens)
        start_s = 0.0
        for number in range(self.sessions):
            start_s += rng.expovariate(self.rate)
            turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / self.turns)) if self.turns > 1 else 1
            drawn = _turns(rng, [self.message_tokens] * turns, self.output_tokens, self.think_s)
            requests += _conversation(f"chat-{number}", system, start_s, drawn, tools=False)
        return _trace("chat", requests, closed_loop=True)


class Agents(_Struct, frozen=True):
    """Agents at work: long prompts that grow with every tool call, short pauses, everything cached but the last step.

    Attributes:
        sessions: agents at the same time.
        spread_s: they begin within this time, at random.
        turns: requests of each.
        system_tokens: tools and system prompt, shared by all.
        task_tokens: what an agent begins with, on average.
        observation_tokens: what a tool answers, on average.
        output_tokens: length of an answer, on average.
        think_s: time that a tool takes, on average.
    """

    sessions: Count = 64
    spread_s: Positive = 60.0
    turns: Count = 20
    system_tokens: Count = 8_000
    task_tokens: Count = 4_000
    observation_tokens: Count = 1_200
    output_tokens: Count = 250
    think_s: Positive = 5.0

    def trace(self, seed: int = 0) -> Trace:
        """Make the sessions; see ``Generator``."""
        rng = random.Random(seed)
        requests: list[SimRequest] = []
        system = _Text(count()).grown(self.system_tokens)
        messages = [self.task_tokens, *[self.observation_tokens] * (self.turns - 1)]
        for number in range(self.sessions):
            drawn = _turns(rng, messages, self.output_tokens, self.think_s)
            start_s = rng.uniform(0, self.spread_s)
            requests += _conversation(f"agent-{number}", system, start_s, drawn, tools=True)
        return _trace("agents", requests, closed_loop=True)


class Tenants(_Struct, frozen=True):
    """Single questions behind the system prompt of a tenant; a few tenants ask most of them.

    Attributes:
        requests: how many.
        rate: requests per second, at random.
        tenants: system prompts.
        zipf: exponent of their popularity; 0: all alike.
        system_tokens: length of a system prompt, on average.
        question_tokens: length of a question, on average.
        output_tokens: length of an answer, on average.
    """

    requests: Count = 6_000
    rate: Positive = 10.0
    tenants: Count = 200
    zipf: Exponent = 1.1
    system_tokens: Count = 4_000
    question_tokens: Count = 300
    output_tokens: Count = 200

    def trace(self, seed: int = 0) -> Trace:
        """Make the questions; see ``Generator``."""
        rng, empty = random.Random(seed), _Text(count())
        systems = [empty.grown(_length(rng, self.system_tokens)) for _ in range(self.tenants)]
        asked = _questions(rng, systems, self.zipf, self.requests, self.rate, self.question_tokens, self.output_tokens)
        return _trace("tenants", list(asked), closed_loop=False)


class Rag(_Struct, frozen=True):
    """Questions about documents that were retrieved: system prompt, then one document, then the question.

    Attributes:
        requests: how many.
        rate: requests per second, at random.
        documents: in the collection.
        zipf: exponent of their popularity; 0: all alike.
        system_tokens: length of the system prompt, shared by all.
        document_tokens: length of a document, on average.
        question_tokens: length of a question, on average.
        output_tokens: length of an answer, on average.
    """

    requests: Count = 4_000
    rate: Positive = 6.0
    documents: Count = 2_000
    zipf: Exponent = 0.9
    system_tokens: Count = 300
    document_tokens: Count = 6_000
    question_tokens: Count = 60
    output_tokens: Count = 300

    def trace(self, seed: int = 0) -> Trace:
        """Make the questions; see ``Generator``."""
        rng = random.Random(seed)
        system = _Text(count()).grown(self.system_tokens)
        contexts = [system.grown(_length(rng, self.document_tokens)) for _ in range(self.documents)]
        asked = _questions(rng, contexts, self.zipf, self.requests, self.rate, self.question_tokens, self.output_tokens)
        return _trace("rag", list(asked), closed_loop=False)


class Bursts(_Struct, frozen=True):
    """The same cold prompt many times at once, again and again with another prompt.

    Attributes:
        bursts: how many.
        every_s: seconds between two of them.
        copies: requests of a burst.
        within_s: time within which they arrive.
        prompt_tokens: length of the prompt they share, on average.
        question_tokens: length of what each adds, on average.
        output_tokens: length of an answer, on average.
    """

    bursts: Count = 100
    every_s: Positive = 5.0
    copies: Count = 32
    within_s: Positive = 0.5
    prompt_tokens: Count = 8_000
    question_tokens: Count = 50
    output_tokens: Count = 100

    def trace(self, seed: int = 0) -> Trace:
        """Make the bursts; see ``Generator``."""
        rng, empty, requests = random.Random(seed), _Text(count()), []
        for number in range(self.bursts):
            shared = empty.grown(_length(rng, self.prompt_tokens))
            for _ in range(self.copies):
                arrival_s = number * self.every_s + rng.uniform(0, self.within_s)
                requests.append(_request(rng, shared, arrival_s, self.question_tokens, self.output_tokens))
        return _trace("bursts", requests, closed_loop=False)


GENERATORS: Final[MappingProxyType[str, type[Chat | Agents | Tenants | Rag | Bursts]]] = MappingProxyType(
    {"chat": Chat, "agents": Agents, "tenants": Tenants, "rag": Rag, "bursts": Bursts}
)


def generator(words: str) -> Generator:
    """Return the generator that ``name`` or ``name:key=value,key=value`` means.

    Raises:
        ValueError: there is no such kind of traffic, or no such key, or a value is out of range, or it is too much.
    """
    name, _, settings = words.partition(":")
    kind = GENERATORS.get(name)
    if kind is None:
        near = get_close_matches(name, GENERATORS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown traffic {name!r}.{hint} Known: {', '.join(GENERATORS)}, or the path of a trace.")
    pairs = dict(pair.partition("=")[::2] for pair in settings.split(",") if pair)
    try:
        found = msgspec.convert(pairs, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}. Keys: {', '.join(kind.__struct_fields__)}.") from None
    counts = [getattr(found, key, 1) for key in ("requests", "sessions", "turns", "bursts", "copies")]
    if math.prod(counts) > MOST_REQUESTS:
        raise ValueError(f"{name}: some {math.prod(counts):,} requests; at most {MOST_REQUESTS:,} can be simulated")
    return found


def _length(rng: random.Random, mean: int) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))


def _turns(rng: random.Random, messages: list[int], output_tokens: int, think_s: float) -> list[tuple[float, int, int]]:
    """Draw the pause before each turn, and the tokens of its message and its answer, around these means."""
    pauses = [0.0, *(rng.expovariate(1 / think_s) for _ in messages[1:])]
    return [
        (pause_s, _length(rng, mean), _length(rng, output_tokens))
        for pause_s, mean in zip(pauses, messages, strict=True)
    ]


def _conversation(
    name: str, text: _Text, start_s: float, turns: list[tuple[float, int, int]], tools: bool
) -> Iterator[SimRequest]:
    """Yield the turns of a conversation."""
    arrival_s = start_s
    for turn, (pause_s, message_tokens, output_tokens) in enumerate(turns, start=1):
        arrival_s += pause_s
        prompt = text.grown(message_tokens)
        text = prompt.grown(output_tokens)
        calls_tool = tools and turn < len(turns)
        yield SimRequest(arrival_s, text.ids, prompt.tokens, output_tokens, name, think_s=pause_s, tool_call=calls_tool)
        arrival_s += output_tokens * _TOKEN_S


def _questions(
    rng: random.Random, contexts: list[_Text], zipf: float, number: int, rate: float, question: int, output: int
) -> Iterator[SimRequest]:
    weights = list(accumulate(1 / rank**zipf for rank in range(1, len(contexts) + 1)))
    arrival_s = 0.0
    for context in rng.choices(contexts, cum_weights=weights, k=number):
        arrival_s += rng.expovariate(rate)
        yield _request(rng, context, arrival_s, question, output)


def _request(rng: random.Random, context: _Text, arrival_s: float, question: int, output: int) -> SimRequest:
    prompt = context.grown(_length(rng, question))
    return SimRequest(arrival_s, prompt.ids, prompt.tokens, _length(rng, output))


def _trace(name: str, requests: list[SimRequest], closed_loop: bool) -> Trace:
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(requests, BLOCK_TOKENS, closed_loop, name)
