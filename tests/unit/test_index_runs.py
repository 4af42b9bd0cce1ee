from __future__ import annotations

import os
import sys

import pytest

from gateway.index.runs import RunTable
from tests.residency import prompt


@pytest.fixture
def table() -> RunTable:
    return RunTable(10_000, lambda _chunks, _mask: None)


def test_what_was_stored_together_is_looked_up_together(table: RunTable) -> None:
    chunks = prompt(60)
    table.set(chunks, 1)
    assert list(table.masks(chunks)) == [(1, 60)]


def test_what_one_worker_stores_bit_by_bit_is_looked_up_together(table: RunTable) -> None:
    ours, theirs = prompt(60), prompt(60, seed=1)
    for chunk, other in zip(ours, theirs, strict=True):
        table.set([chunk], 1)
        table.set([other], 2)
    assert list(table.masks(ours)) == [(1, 60)]
    assert list(table.masks(theirs)) == [(2, 60)]


def test_a_second_holder_of_the_beginning_parts_the_run_there(table: RunTable) -> None:
    chunks = prompt(60)
    table.set(chunks, 1)
    for chunk in chunks[:20]:
        table.set([chunk], 2)
    assert list(table.masks(chunks)) == [(3, 20), (1, 40)]


def test_what_one_holder_evicts_from_the_end_is_still_looked_up_together(table: RunTable) -> None:
    chunks = prompt(60)
    table.set(chunks, 3)
    for chunk in reversed(chunks[20:]):
        table.clear([chunk], 2)
    assert list(table.masks(chunks)) == [(3, 20), (1, 40)]


def test_a_prompt_that_parts_from_a_run_shares_it_up_to_there(table: RunTable) -> None:
    chunks = prompt(60)
    table.set(chunks, 1)
    assert list(table.masks([*chunks[:25], *prompt(2, seed=1)])) == [(1, 25), (0, 1), (0, 1)]
    assert list(table.masks(chunks[:10])) == [(1, 10)]


def test_a_guess_that_was_right_is_a_guess_again_when_the_run_grows(table: RunTable) -> None:
    chunks, (other,) = prompt(4), prompt(1, seed=1)
    table.set(chunks[:2], 1)
    assert list(table.masks(chunks[:2])) == [(1, 2)]
    table.set([other, chunks[3]], 1)
    assert list(table.masks(chunks)) == [(1, 2), (0, 1), (1, 1)]


def test_a_guess_that_was_right_is_wrong_when_chunks_between_are_gone(table: RunTable) -> None:
    chunks = prompt(6)
    table.set(chunks, 1)
    assert list(table.masks(chunks)) == list(table.masks(chunks)) == [(1, 6)]
    table.clear([chunks[2]], 1)
    assert list(table.masks(chunks)) == [(1, 2), (0, 1), (1, 3)]
    assert list(table.masks(chunks[3:])) == [(1, 3)]


def test_long_prompts_are_several_runs(table: RunTable) -> None:
    chunks = prompt(512)
    table.set(chunks, 1)
    assert sum(length for _, length in table.masks(chunks)) == 512
    assert len(list(table.masks(chunks))) == 8


def test_a_table_of_several_dicts_forgets_what_is_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.index.runs._SHARD_CHUNKS", 2_000)
    gone: list[bytes] = []
    table = RunTable(20_000, lambda chunks, _mask: gone.extend(chunks))
    for number in range(1_000):
        table.set(prompt(40, seed=number), 1)
    assert 18_000 < len(table) <= 20_000
    assert len(table) + len(gone) == 40_000


def test_the_dicts_of_a_table_are_never_all_half_empty() -> None:
    table = RunTable(4_000_000, lambda _chunks, _mask: None)
    bytes_per_chunk = []
    for _ in range(64):
        for _ in range(1_000):
            table.set([os.urandom(16)], 1)
        bytes_per_chunk.append(sum(map(sys.getsizeof, table._shards)) / len(table))
    assert max(bytes_per_chunk[16:]) < 45  # 53 where all grow at once
