from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.index.runs import _RUN_CHUNKS, RunTable

N = 200
CHUNKS = [number.to_bytes(15, "big") + bytes([number * 7 % 256]) for number in range(N)]
PARTED = 77
BRANCH = CHUNKS[:PARTED] + [number.to_bytes(16, "big") for number in range(60)]
"""A prompt that parts from the one of ``CHUNKS``."""

BOUND = 10_000


def stretch(start: int, length: int, step: int) -> list[bytes]:
    return [CHUNKS[number % N] for number in range(start, start + length * step, step)]


# Mostly stretches of a chain, forwards or backwards; sometimes anything, with repetitions.
_SOME = st.one_of(
    st.builds(stretch, st.integers(0, N), st.integers(1, 150), st.sampled_from([1, 1, 1, -1, 2])),
    st.lists(st.sampled_from(CHUNKS + BRANCH), min_size=1, max_size=8),
)
_PROMPTS = st.builds(lambda prompt, length: prompt[:length], st.sampled_from([CHUNKS, BRANCH]), st.integers(1, N))
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "clear", "clear_run"]), _SOME, st.sampled_from([1, 2, 16, 1 << 40, 15]), _PROMPTS
    ),
    max_size=30,
)


def refuse(chunks: Sequence[bytes], mask: int) -> None:
    raise AssertionError("nothing should be evicted")


def check(table: RunTable) -> None:
    """Each chunk is in exactly one run, to which it leads, and runs are not too long."""
    held = [chunk for chunks in table.in_steps(64) for chunk in chunks]
    runs = {id(run): run for run in map(table._find, held)}
    assert sorted(chunk for run in runs.values() for chunk in run.chunks) == sorted(held)
    assert all(chunk in table._find(chunk).chunks for chunk in held)
    assert all(run.mask and len(run.chunks) <= _RUN_CHUNKS for run in runs.values())
    assert len(table) == len(held)


@given(_STEPS)
def test_a_run_table_is_a_table_of_masks(steps: list[tuple[str, list[bytes], int, list[bytes]]]) -> None:
    table, model = RunTable(BOUND, refuse), dict.fromkeys(CHUNKS + BRANCH, 0)
    for what, chunks, bits, prompt in steps:
        if what == "set":
            table.set(chunks, bits)
            model |= {chunk: model[chunk] | bits for chunk in chunks}
        elif what == "clear":
            table.clear(chunks, bits)
            model |= {chunk: model[chunk] & ~bits for chunk in chunks}
        else:
            cleared, gone = table.clear_run(chunks[0], bits)
            assert gone == model[chunks[0]] & bits
            model |= {chunk: model[chunk] & ~gone for chunk in cleared}
        check(table)
        assert {chunk: table.mask(chunk) for chunk in model} == model
        for looked_up in (prompt, prompt, CHUNKS, BRANCH):  # what is looked up for the second time is compared less
            masks = [mask for mask, length in table.masks(looked_up) for _ in range(length)]
            assert masks == [model[chunk] for chunk in looked_up]


@given(st.lists(_SOME, max_size=20), st.integers(70, 150))
def test_a_full_run_table_forgets_some_and_says_which(stores: list[list[bytes]], bound: int) -> None:
    gone: list[bytes] = []
    table = RunTable(bound, lambda chunks, _mask: gone.extend(chunks))
    stored: set[bytes] = set()
    for chunks in stores:
        gone.clear()
        table.set(chunks, 1)
        check(table)
        stored = (stored | set(chunks)) - (set(gone) - {chunk for chunk in gone if table.mask(chunk)})
        assert {chunk for chunk in CHUNKS + BRANCH if table.mask(chunk)} == stored
        assert len(table) <= bound
