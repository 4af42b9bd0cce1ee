"""Long prompts in pieces: a cold context is prefilled by a chain of short requests, so that others can go in between.

An engine finishes a prompt that it has begun before it takes up the next one, so whoever comes behind a cold context
of 100,000 tokens waits for all of it, however little work it has. A piece is a request of the gateway's own for one
token over a prefix of the prompt. It leaves that prefix in the engine's cache, the next piece goes on from there, and
the prompt itself has but its end left to prefill. Between pieces the least remaining work goes first: shortest
remaining processing time (Schrage 1968), preempted at the end of a piece.

Until the next piece comes nothing keeps the prefix from being evicted. Where running contexts leave it little room,
prompts had better go whole.
"""

from __future__ import annotations

from typing import Final

_LEAST_PIECES: Final = 2  # of a prompt that has no more of them uncached, pieces cost what they save
_ROOM: Final = 0.8  # of HBM: what running contexts and the prompt may fill together


def is_long(uncached_tokens: int, piece_tokens: int) -> bool:
    """Return whether a prompt with so many uncached tokens is worth being cut into pieces."""
    return uncached_tokens > _LEAST_PIECES * piece_tokens


def piece_ends(prompt_tokens: int, cached_tokens: int, piece_tokens: int, chunk_tokens: int) -> list[int]:
    """Return how many leading tokens of a prompt each of its pieces covers, in order, in whole chunks.

    What the prompt itself then has left is at least a quarter of a piece: a shorter end is not worth a request.

    Args:
        prompt_tokens: length of the prompt.
        cached_tokens: leading tokens of it that the worker holds.
        piece_tokens: uncached tokens of a piece, at least ``chunk_tokens``.
        chunk_tokens: tokens per chunk.

    Returns:
        Nothing where the prompt is not long: it goes whole.
    """
    if not is_long(prompt_tokens - cached_tokens, piece_tokens):
        return []
    first = (cached_tokens + piece_tokens) // chunk_tokens * chunk_tokens
    step = piece_tokens // chunk_tokens * chunk_tokens
    return list(range(first, prompt_tokens - piece_tokens // 4, step))


def has_room(prompt_tokens: int, running_tokens: float, capacity_tokens: float) -> bool:
    """Return whether a worker can be expected to keep what pieces leave in its cache until the next one comes.

    Args:
        prompt_tokens: length of the prompt.
        running_tokens: contexts that are being decoded there.
        capacity_tokens: of its HBM; 0, unknown, has no room.
    """
    return prompt_tokens + running_tokens <= _ROOM * capacity_tokens
