"""What it costs to get from a request's bytes to its chunk hashes, and how long that holds up everything else.

``python -m tests.bench.prompt [--json]``. Everything runs in this process, on one thread but for what the prompt room
itself moves to others. *Warm* is the next turn of a conversation: every text was seen before but the last message,
which is new each time. *Cold* is a conversation none of whose texts was seen before. The texts are words of the tiny
model's vocabulary; a large model's tokenizer takes longer over new text, and no longer over known text. A gap is the
longest time that passed between two turns of the event loop, less that for which the kernel let the thread wait for a
core (from ``schedstat``, where there is one), and no longer than the CPU time that all threads took meanwhile: on a
machine with other work, the holder of Python's lock may wait for a core, too. The idle one is what is left of that.

Targets are held against the best round, by wall time or by the CPU time of all threads if that is less, and gaps
against the best of three passes for each prompt of the pass: whatever else runs on the machine can only add to these.
The cases take turns, in several passes, since a virtual machine is slower for seconds at a time. Median and 99th
percentile of wall time stand beside the best, and beside what is new what fastokens alone takes for its texts: a
target missed where that is slow tells of the machine. With ``--json`` the last line of output is one JSON object; its
``targets`` say of each target whether it was met.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import threading
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from unittest import mock

import tokenizers
import uvloop
from rich.console import Console
from rich.table import Table

from gateway.prompt import tokenizer as tokenizer_module
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.tokenizer import Encoder, load_tokenizer
from tests.prompt_rig import CHAT, TINY, candidates, config, reference

NEW_MESSAGE_TOKENS = 60
TOKENS_PER_WORD = 1.09
PASSES = 24
WARM_ROUNDS = 50
LONG_ROUNDS = 15
COLD_ROUNDS = 5
GAP_ROUNDS = 3
GAP_PASSES = 3

Bodies = Iterator[bytes]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        title: what is measured.
        tokens: length of the prompt.
        messages: of the conversation.
        fresh: what is new in each request: ``nothing``, ``last`` message, ``all`` messages.
        rounds: of a pass.
        limit_us: what the best round is to stay below.
    """

    title: str
    tokens: int
    messages: int
    fresh: str
    rounds: int
    limit_us: float


CASES = {
    "warm_8k_100us": Case("8k tokens, new last message", 8_192, 20, "last", WARM_ROUNDS, 100),
    "warm_128k_1ms": Case("128k tokens, new last message", 131_072, 200, "last", LONG_ROUNDS, 1_000),
    "cold_8k_0.5ms": Case("8k tokens, all new", 8_192, 20, "all", LONG_ROUNDS, 500),
    "cold_128k_6ms": Case("128k tokens, all new", 131_072, 200, "all", COLD_ROUNDS, 6_000),
}
MORE_CASES = {
    "short_known": Case("short chat, known texts", 200, 2, "nothing", WARM_ROUNDS, 0),
    "short_new": Case("short chat, new last message", 200, 2, "last", WARM_ROUNDS, 0),
}
GAP_LIMIT_US = 10_000
HUGGING_FACE = "hugging_face_cold_8k"
FULL_SPEED = 1.15  # times what the library alone takes


class Writer:
    """Writes conversations in words of a tokenizer's vocabulary, lines and quotes among them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._random = random.Random(7)
        self._tokenizer = tokenizer
        vocabulary = (tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size()))
        self._words = [word for word in vocabulary if word[:1] == " " and word[1:].isalpha() and len(word) <= 6]

    def text(self, tokens: int) -> str:
        """Return a new text of about that many tokens."""
        words = self._random.choices(self._words, k=tokens)
        for at in range(11, tokens, 12):
            words[at] = self._random.choice(['."\n', ":\n\n", ".\n", ' "'])
        return "".join(words)

    def bodies(self, case: Case) -> Bodies:
        """Yield request bodies of a case, endlessly."""
        size = int(case.tokens / case.messages / TOKENS_PER_WORD) - 5
        last = min(size, NEW_MESSAGE_TOKENS)
        texts = [self.text(size) for _ in range(case.messages - 1)] + [self.text(last)]
        while True:
            if case.fresh == "all":
                texts = [self.text(size) for _ in range(case.messages)]
            elif case.fresh == "last":
                texts[-1] = self.text(last)
            roles = ["system", *["user", "assistant"] * case.messages]
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            yield json.dumps({"model": "tiny", "messages": messages, "stream": True, "max_tokens": 100}).encode()


async def run(pipeline: PromptPipeline, body: bytes) -> int:
    """Do what the gateway does for one request; return the prompt's length in tokens."""
    return (await pipeline.prompt(pipeline.parse(CHAT, body), candidates())).tokens


async def settle(pipeline: PromptPipeline) -> None:
    """Wait until no plan is being drawn up any more."""
    await asyncio.get_running_loop().run_in_executor(pipeline._executor, gc.collect)
    await asyncio.sleep(0.05)


class Rounds:
    """What the rounds of one case took.

    Attributes:
        tokens: length of the prompt.
        best_us: of wall time and of the CPU time of all threads, whichever was less.
        times_us: wall times.
        library_us: after each round whose texts were all new, what the tokenizer library alone took for such texts.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.best_us = inf
        self.times_us: list[float] = []
        self.library_us: list[float] = []

    def figures(self) -> dict[str, float]:
        """Return best, median and 99th percentile, in µs, and how many times the library's time a round took."""
        times = sorted(self.times_us)
        found = {
            "tokens": self.tokens,
            "best_us": self.best_us,
            "p50_us": times[len(times) // 2],
            "p99_us": times[len(times) * 99 // 100],
        }
        if self.library_us:
            over = [time / library for time, library in zip(self.times_us, self.library_us, strict=True)]
            found |= {"library_us": min(self.library_us), "over_library": median(over)}
        return found


async def measure(pipeline: PromptPipeline, encoder: Encoder, writer: Writer, case: Case, rounds: Rounds) -> None:
    """Measure a pass of a case, and where all is new the encoder alone."""
    bodies = writer.bodies(case)
    chosen = candidates()
    for _ in range(3):  # the shape is seen, gets its plan, and has it
        rounds.tokens = await run(pipeline, next(bodies))
        await settle(pipeline)
    requests = [next(bodies) for _ in range(case.rounds)]
    gc.collect()
    for body in requests:
        cpu_started, started = process_time(), perf_counter()
        await pipeline.prompt(pipeline.parse(CHAT, body), chosen)
        elapsed, cpu = perf_counter() - started, process_time() - cpu_started
        rounds.times_us.append(elapsed * 1e6)
        rounds.best_us = min(rounds.best_us, elapsed * 1e6, cpu * 1e6)
        if case.fresh == "all":
            rounds.library_us.append(library_us(encoder, writer, case))


def library_us(encoder: Encoder, writer: Writer, case: Case) -> float:
    """Return how long a tokenizer library takes to the ids of a new prompt's texts, in µs."""
    texts = [writer.text(case.tokens // case.messages) for _ in range(case.messages)]
    started = perf_counter()
    encoder.encode(texts)
    return (perf_counter() - started) * 1e6


class RunClock:
    """Seconds that pass for this thread while it runs, or waits for anything else than a core."""

    def __init__(self) -> None:
        file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._file = file.open("rb", buffering=0) if file.exists() else None

    def __call__(self) -> float:
        if self._file is None:
            return perf_counter()
        self._file.seek(0)
        waited_ns = int(self._file.read(64).split()[1])
        return perf_counter() - waited_ns / 1e9


async def longest_gap(work: Awaitable[object]) -> float:
    """Return the longest time in µs for which nothing else ran on the event loop while ``work`` did."""
    longest = 0.0
    clock = RunClock()
    running = asyncio.ensure_future(work)
    before, cpu_before = clock(), process_time()
    while not running.done():
        await asyncio.sleep(0)
        now, cpu_now = clock(), process_time()
        longest = max(longest, min(now - before, cpu_now - cpu_before))
        before, cpu_before = now, cpu_now
    await running
    return longest * 1e6


async def gaps(writer: Writer) -> float:
    """Return the longest gap over new conversations of 128k tokens, the first of their shape included.

    Each pass begins with a new pipeline; of each prompt in a pass the best of all passes counts.
    """
    passes = []
    for _ in range(GAP_PASSES):
        pipeline = PromptPipeline(config())
        found = []
        for case in (Case("many messages", 131_072, 201, "all", 0, 0), Case("few messages", 131_072, 3, "all", 0, 0)):
            bodies = writer.bodies(case)
            found += [await longest_gap(run(pipeline, next(bodies))) for _ in range(GAP_ROUNDS)]
            await settle(pipeline)
        passes.append(found)
        await pipeline.close()
    return max(map(min, *passes))


async def measure_all(cases: Mapping[str, Case], writer: Writer) -> dict[str, dict[str, float]]:
    """Measure cases in turns, with a pipeline of their own."""
    pipeline, encoder = PromptPipeline(config()), load_tokenizer(TINY).encoder
    rounds = {name: Rounds() for name in cases}
    for _ in range(PASSES):
        for name, case in cases.items():
            await measure(pipeline, encoder, writer, case, rounds[name])
    await pipeline.close()
    return {name: each.figures() for name, each in rounds.items()}


async def everything() -> dict[str, dict[str, float]]:
    """Measure all cases with both libraries."""
    tokenizer = reference(TINY)
    writer = Writer(tokenizer)
    results: dict[str, dict[str, float]] = {}
    gc.freeze()  # as the gateway does when it is ready
    results["idle_gap"] = {"longest_us": min([await longest_gap(asyncio.sleep(0.05)) for _ in range(GAP_PASSES)])}
    results |= await measure_all({**CASES, **MORE_CASES}, writer)
    results["gap_10ms"] = {"longest_us": await gaps(writer)}
    with mock.patch.object(tokenizer_module, "fastokens", None):
        results |= await measure_all({HUGGING_FACE: CASES["cold_8k_0.5ms"]}, writer)
        results["hugging_face_gap_10ms"] = {"longest_us": await gaps(writer)}
    return results


def targets(results: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Return for each target whether it was met."""
    met = {name: results[name]["best_us"] <= case.limit_us for name, case in CASES.items()}
    met |= {name: results[name]["longest_us"] <= GAP_LIMIT_US for name in results if name.endswith("gap_10ms")}
    met["hugging_face_full_speed"] = results[HUGGING_FACE]["over_library"] <= FULL_SPEED
    return met


def print_table(results: dict[str, dict[str, float]]) -> None:
    table = Table(title="From body bytes to chunk hashes, µs")
    for heading in ("", "tokens", "best", "median", "p99", "target"):
        table.add_column(heading, justify="right" if heading else "left")
    lines = [(case.title, results[name], case.limit_us) for name, case in {**CASES, **MORE_CASES}.items()]
    for title, figures, limit in [*lines, ("8k tokens, all new, Hugging Face", results[HUGGING_FACE], 0)]:
        cells = [f"{figures[key]:,.1f}" for key in ("best_us", "p50_us", "p99_us")]
        table.add_row(title, f"{figures['tokens']:,}", *cells, f"{limit:,.0f}" if limit else "")
        if "library_us" in figures:
            table.add_row("  the library alone", "", f"{figures['library_us']:,.1f}")
    titles = {"gap_10ms": "", "hugging_face_gap_10ms": ", Hugging Face", "idle_gap": ", idle"}
    for name, what in titles.items():
        most = "" if name == "idle_gap" else f"{GAP_LIMIT_US:,}"
        table.add_row(f"longest gap{what}", "", "", "", f"{results[name]['longest_us']:,.1f}", most)
    console = Console()
    console.print(table)
    for target, met in targets(results).items():
        console.print(f"{'yes' if met else 'no ':<4}{target}", highlight=False)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    results = uvloop.run(everything())
    print_table(results)
    if arguments.json:
        machine = {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "results": results, "targets": targets(results)}))


if __name__ == "__main__":
    main()
