"""Where the pieces of a long prompt end, and when there is room for what they leave in the cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.pieces import has_room, piece_ends


@pytest.mark.parametrize(
    ("prompt", "cached", "ends"),
    [
        (16_384, 0, []),
        (16_385, 0, [8192]),  # an end of one token would not be worth a request
        (16_384 + 4096, 4096, []),
        (16_384 + 2048, 0, [8192]),
        (16_384 + 2049, 0, [8192, 16_384]),
        (40_000, 0, [8192, 16_384, 24_576, 32_768]),
        (40_000, 20_480, [28_672, 36_864]),
        (40_000, 20_500, [28_672, 36_864]),
    ],
)
def test_pieces_end_with_whole_chunks_and_leave_the_prompt_an_end_of_its_own(prompt, cached, ends):
    assert piece_ends(prompt, cached, 8192, 256) == ends


@given(st.integers(1, 200_000), st.floats(0, 1), st.integers(1, 20_000), st.integers(1, 512))
def test_no_piece_has_much_more_than_its_size_to_compute(prompt, share, piece, chunk):
    piece, cached = max(piece, chunk), int(prompt * share)
    ends = piece_ends(prompt, cached, piece, chunk)
    assert not ends or prompt - cached > 2 * piece
    begins = [cached, *ends]
    for begin, end in zip(begins, ends, strict=False):
        assert end % chunk == 0
        assert 0 < end - begin <= piece
    assert not ends or 0 < prompt - ends[-1] <= piece + piece // 4 + chunk


def test_a_cache_full_of_running_contexts_has_no_room_and_one_of_unknown_size_neither():
    assert has_room(30_000, 50_000, 100_000)
    assert not has_room(30_001, 50_000, 100_000)
    assert not has_room(1, 0, 0)
