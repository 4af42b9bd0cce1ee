"""Text for prompts that are known by the ids of their blocks: equal ids give equal text, different ids different text.

Every word is three letters and a space, and common in English: with the tokenizers of today's models one token, and
four bytes, which is a token to a ``kvway worker`` without a tokenizer. Prompts therefore have the length that the trace
says within a few percent; what they really had is in the usage of the answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

WORDS: Final = tuple(
    """
    the and for are but not you all any can had was one our out day get has how man new now old see two way who did its
    let put say she too use act add age ago air art ask bad bag bar bed big bit box bus buy car cat cup cut dog eat egg
    end eye far few fit fly
    """.split()
)
WORD_CHARS: Final = 4
_DIGIT_BITS: Final = 6  # 64 words
_MARK_WORDS: Final = -(-63 // _DIGIT_BITS)
_PASSAGE_WORDS: Final = 1 << 18
MAX_BLOCK_WORDS: Final = 1 << 16


def _passage() -> str:
    rng = random.Random(0)
    return "".join(f"{word} " for word in rng.choices(WORDS, k=_PASSAGE_WORDS))


_PASSAGE: Final = _passage()


def block_text(block: int, words: int) -> str:
    """Return the text of a block: its id, written with words as digits, then a piece of one long passage.

    Args:
        block: id, 0 to 2**63 - 1.
        words: length, at most ``MAX_BLOCK_WORDS``; texts of at least 11 words differ whenever the ids do.
    """
    digits, rest = [], block
    for _ in range(_MARK_WORDS):
        digits.append(WORDS[rest % len(WORDS)])
        rest >>= _DIGIT_BITS
    mark = " ".join(digits) + " "
    start = block % (_PASSAGE_WORDS - MAX_BLOCK_WORDS) * WORD_CHARS
    return (mark + _PASSAGE[start : start + words * WORD_CHARS])[: words * WORD_CHARS]


def prompt_text(blocks: Iterable[int], block_words: int, tail: int, words: int) -> str:
    """Return the text of ``words`` words that whole blocks begin and the text of the block ``tail`` ends."""
    text = "".join(block_text(block, block_words) for block in blocks)[: words * WORD_CHARS]
    missing = words - len(text) // WORD_CHARS
    parts = [text]
    while missing > 0:  # what no id of the trace names
        part = min(missing, block_words)
        parts.append(block_text(tail, part))
        missing -= part
        tail += 1
    return "".join(parts)
