"""Workloads with real text: agent sessions whose every turn repeats the conversation so far and adds to it.

``coding_agents`` writes such sessions itself, deterministically by seed; ``read_agent_text`` reads recorded ones (JSON
lines with ``session_id``, ``timestamp``, ``input``, ``output``).
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the whole prompt, as an OpenAI body without ``model``, and how long its agent pauses before it."""

    path: str
    body: dict[str, Any]
    think_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another; a turn is sent when the one before it has been answered."""

    name: str
    turns: tuple[Turn, ...]


_SYSTEM = """You are a careful software engineer working in a checked-out repository through a shell.
Work in small steps. Read before you change, change as little as needed, and run the tests after each change.

Tools
- shell(command): run one command; its output comes back, cut after 4,000 characters.
- edit(path, old, new): replace one exact occurrence of a text in a file.
- submit(summary): say that the task is done and what was changed.

Rules
1. Answer with one short thought and exactly one tool call.
2. Never change files under tests/ unless the task asks for it.
3. Keep public names and signatures as they are; callers outside this repository depend on them.
4. When a command fails, say what you expected and what you saw before you try another.
5. Prefer the standard library. Do not add a dependency without asking.
6. Before you submit, run the whole test suite once and quote its last line.
"""
_TEAMS = ("billing", "search", "ingest")
_TEAM_RULES = (
    "Money is integer cents; rounding happens once, at the edge. Every public function has a docstring with its unit.",
    "Queries must stay under 50 ms at the 99th percentile. Never build an index inside a request handler.",
    "Every record is processed at least once; handlers are idempotent and say so. Timestamps are UTC milliseconds.",
)
_NOUNS = """
account batch cache cursor event filter index invoice ledger merge offset order page parser plan queue
record report route schema segment shard snapshot stream table tenant ticket token topic window worker
""".split()
_VERBS = """
apply build check clear collect compare convert decode drop encode expand fetch find flush join load
match merge open pack parse prune read refresh replay reset resolve rotate scan select send split
""".split()
_TYPES = ("int", "str", "bytes", "float", "list[int]", "dict[str, int]", "bool", "tuple[str, ...]")
_FAULTS = (
    "returns the wrong {noun} when two of them share a key",
    "drops the last {noun} of every {other}",
    "raises KeyError instead of skipping an empty {noun}",
    "is quadratic in the number of {noun}s",
    "keeps a stale {noun} after the {other} was rotated",
    "counts a {noun} twice when the {other} is retried",
)
_THOUGHTS = (
    "I expect the {noun} to be handled before the {other}; let me look at the code.",
    "The failing case names the {noun}, so I will see who calls it.",
    "The {other} is built here, which would explain the symptom. I want to be sure.",
    "This matches the report. A guard on the {noun} should be enough; let me check the callers first.",
    "The change is small. I will run the tests that touch the {noun}.",
)


def coding_agents(
    sessions: int, turns: int, seed: int = 0, output_tokens: int = 48, think_s: float = 1.0, observation_lines: int = 28
) -> list[Session]:
    """Write coding-agent sessions.

    All share a system prompt, each of three teams shares some more, everything after that is a session's own.

    Args:
        sessions: number of sessions.
        turns: requests per session.
        seed: same seed, same text.
        output_tokens: ``max_tokens`` of every request.
        think_s: mean pause before a turn in seconds (exponential); first turns are spread over half a session.
        observation_lines: lines a tool answers with; the prompt grows by these each turn.
    """
    return [
        _coding_agent(number, turns, random.Random(f"{seed}/{number}"), output_tokens, think_s, observation_lines)
        for number in range(sessions)
    ]


def _coding_agent(
    number: int, turns: int, rng: random.Random, output_tokens: int, think_s: float, lines: int
) -> Session:
    team = number % len(_TEAMS)
    module = f"{_TEAMS[team]}/{rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}{rng.randrange(100)}.py"
    fault = rng.choice(_FAULTS).format(noun=rng.choice(_NOUNS), other=rng.choice(_NOUNS))
    messages: list[dict[str, str]] = [
        {"role": "system", "content": f"{_SYSTEM}\nTeam {_TEAMS[team]}. {_TEAM_RULES[team]}"},
        {"role": "user", "content": f"`{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}` in {module} {fault}. Please fix it."},
    ]
    made = []
    for turn in range(turns):
        body = {"messages": list(messages), "max_tokens": output_tokens, "temperature": 0}
        pause = rng.uniform(0, turns * think_s / 2) if turn == 0 else rng.expovariate(1 / think_s)
        made.append(Turn("/v1/chat/completions", body, pause))
        thought = rng.choice(_THOUGHTS).format(noun=rng.choice(_NOUNS), other=rng.choice(_NOUNS))
        command, observation = _step(module, rng, lines)
        messages.append({"role": "assistant", "content": f"{thought}\nshell({command!r})"})
        messages.append({"role": "user", "content": f"exit 0\n{observation}"})
    return Session(f"agent-{number}", tuple(made))


def _step(module: str, rng: random.Random, lines: int) -> tuple[str, str]:
    """Return a shell command and what it prints."""
    kind = rng.randrange(3)
    if kind == 0:
        start = rng.randrange(400)
        return f"sed -n {start},{start + lines}p {module}", "\n".join(_code(rng, lines))
    if kind == 1:
        word = rng.choice(_NOUNS)
        found = (f"{_path(rng)}:{rng.randrange(900)}:    {_call(rng)}  # {word}" for _ in range(lines))
        return f"grep -rn {word} .", "\n".join(found)
    names = (
        f"tests/{_path(rng)}::test_{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}_{rng.randrange(50)}" for _ in range(lines)
    )
    report = [f"{name} {rng.choice(('PASSED', 'PASSED', 'PASSED', 'FAILED'))} [{rng.random():.4f}s]" for name in names]
    return "python -m pytest -q", "\n".join(report)


def _code(rng: random.Random, lines: int) -> Iterator[str]:
    written = 0
    while written < lines:
        name, noun, kind = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}", rng.choice(_NOUNS), rng.choice(_TYPES)
        yield f"def {name}({noun}: {kind}, limit: int = {rng.randrange(1000)}) -> {rng.choice(_TYPES)}:"
        yield f'    """{rng.choice(_VERBS).title()} the {noun} of a {rng.choice(_NOUNS)} ({rng.randrange(99)})."""'
        yield f"    {rng.choice(_NOUNS)} = {_call(rng)}"
        yield f"    return {_call(rng)}"
        written += 4


def _call(rng: random.Random) -> str:
    return (
        f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}({rng.choice(_NOUNS)}[{rng.randrange(64)}], {rng.randrange(4096)})"
    )


def _path(rng: random.Random) -> str:
    return f"{rng.choice(_TEAMS)}/{rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}.py"


def read_agent_text(
    folder: Path, turns: int, output_tokens: int = 48, think_s: float = 1.0, seed: int = 0
) -> list[Session]:
    """Read recorded agent sessions as completion prompts.

    Args:
        folder: holds ``*.jsonl.gz``, one session a file.
        turns: at most this many requests of each session.
        output_tokens: ``max_tokens`` of every request.
        think_s: mean pause before a turn in seconds; recorded pauses would take hours.
        seed: for the pauses.

    Returns:
        The sessions, empty where the folder does not exist.
    """
    sessions = []
    for file in sorted(folder.glob("*.jsonl.gz")):
        rng = random.Random(f"{seed}/{file.name}")
        with gzip.open(file, "rb") as lines:
            records = [msgspec.json.decode(line) for line in lines]
        records.sort(key=lambda record: record["timestamp"])
        made = tuple(
            Turn(
                "/v1/completions",
                {"prompt": record["input"], "max_tokens": output_tokens, "temperature": 0},
                rng.expovariate(1 / think_s),
            )
            for record in [record for record in records if record["input"]][:turns]
        )
        sessions.append(Session(file.name.removesuffix(".jsonl.gz"), made))
    return sessions
