"""The requests of the benchmark: real English text, deterministic, ready as bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from random import Random

import msgspec

from tests.bench.fast_upstream import CHUNKS_PER_STREAM, MODEL


@cache
def corpus() -> str:
    """Return some 450 KB of English with code in it, which every Python installation carries."""
    return re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))


def passage(random: Random, characters: int) -> str:
    start = random.randrange(len(corpus()) - characters)
    return corpus()[start : start + characters]


@dataclass(frozen=True)
class Prompts:
    """A pool of conversations.

    Attributes:
        conversations: how many different ones.
        messages: messages in each.
        characters: length of each message; the first of each conversation is shared by all (the system prompt).
        new_last_message: whether every request ends in a message never sent before.
    """

    conversations: int
    messages: int
    characters: int
    new_last_message: bool


# About 450 tokens; what is repeated is known to every cache.
SHORT = Prompts(conversations=64, messages=2, characters=900, new_last_message=False)
# The same length, but no two requests are equal.
SHORT_NEW = Prompts(conversations=64, messages=3, characters=600, new_last_message=True)
# 32 KB, about 8,000 tokens.
LONG = Prompts(conversations=48, messages=31, characters=1020, new_last_message=True)

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
NO_FIELDS: Mapping[str, object] = {}
MARK = "%last%message%"
NEW_MESSAGE_CHARACTERS = 240


def request_source(prompts: Prompts, number: int, fields: Mapping[str, object] = NO_FIELDS) -> Callable[[], bytes]:
    """Return a function that gives the next request, head and body.

    Args:
        prompts: the conversations, each in its turn.
        number: sequences of new messages with different numbers differ, with the same number they are the same.
        fields: what is added to every body.
    """
    bodies = [msgspec.json.encode({**body, **fields}) for body in conversations(prompts)]
    if not prompts.new_last_message:
        requests: Iterator[bytes] = itertools.cycle([_http(body) for body in bodies])
    else:
        requests = _with_new_last_messages(bodies, Random(number))
    return requests.__next__


def conversations(prompts: Prompts) -> Iterator[dict[str, object]]:
    random = Random(prompts.characters)
    system = passage(random, prompts.characters)
    for _ in range(prompts.conversations):
        messages = [{"role": "system", "content": system}]
        for turn in range(1, prompts.messages):
            role = "user" if turn % 2 else "assistant"
            messages.append({"role": role, "content": passage(random, prompts.characters)})
        if prompts.new_last_message:
            messages.append({"role": "user", "content": MARK})
        yield {"model": MODEL, "messages": messages, "max_tokens": CHUNKS_PER_STREAM}


def _with_new_last_messages(bodies: list[bytes], random: Random) -> Iterator[bytes]:
    halves = [tuple(body.split(MARK.encode())) for body in bodies]
    for number in itertools.count():
        before, after = halves[number % len(halves)]
        # The number makes the message new even where the passage is not.
        text = f"Question {random.getrandbits(48)}: {passage(random, NEW_MESSAGE_CHARACTERS)}"
        yield _http(before + msgspec.json.encode(text)[1:-1] + after)


def _http(body: bytes) -> bytes:
    return HEAD % len(body) + body
