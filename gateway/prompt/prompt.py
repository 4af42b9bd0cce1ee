"""What the rest of the gateway gets of a prompt."""

from __future__ import annotations

from collections.abc import Sequence


class Prompt:
    """A prompt as routing sees it.

    Attributes:
        tokens: its length in tokens; an estimate unless ``exact``.
        chunks: chained chunk hashes, whole chunks only; empty where the prompt could not be read.
        exact: whether tokens and chunks are the engine's.
        tokenized: whether they are the work of the tokenizer here, which the engine can check.
    """

    __slots__ = ("_parts", "chunks", "exact", "tokenized", "tokens")

    def __init__(
        self, tokens: int, chunks: list[bytes], exact: bool, parts: Sequence[bytes] = (), tokenized: bool = False
    ) -> None:
        self.tokens = tokens
        self.chunks = chunks
        self.exact = exact
        self.tokenized = tokenized
        self._parts = parts

    @property
    def ids(self) -> bytes:
        """All token ids, packed little-endian u32; empty unless ``exact``."""
        return b"".join(self._parts)
