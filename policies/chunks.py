"""Chained chunk hashes: the names under which kvway speaks of cached prefixes.

``H_k = mmh3_x64_128(H_{k-1} || tokens_k as little-endian u32 || extra_k)`` with ``H_{-1}`` derived from everything that
makes two equal token runs different caches: model, LoRA adapter, cache salt and the chunk length itself. ``extra_k``
names the images and the like that reach into the chunk, and says where each begins. Engine block hashes are never
recomputed; ``gateway.events`` maps them onto these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import mmh3

DIGEST_BYTES: Final = 16
TOKEN_BYTES: Final = 4

Medium = tuple[bytes, int]
"""The engine's name of an image, audio, video or embedding, and where it begins: in tokens from some other place."""

_digest = mmh3.mmh3_x64_128_digest


def media_extra(media: Iterable[Medium]) -> bytes:
    """Return what media add to the hash of a chunk that they reach into.

    Args:
        media: from the beginning of the chunk, in the order of the prompt; one that is named again counts once.
    """
    return b"\0".join([b"%b@%d" % medium for medium in dict.fromkeys(media)])


class ChunkHasher:
    """Hashes token runs into chunks of ``chunk_tokens`` tokens.

    Args:
        chunk_tokens: tokens per chunk; any multiple of the engine's block size.
        seed: murmur seed; the same on every replica that shares an index.
    """

    __slots__ = ("chunk_bytes", "chunk_tokens", "seed")

    def __init__(self, chunk_tokens: int, seed: int = 0) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * TOKEN_BYTES
        self.seed = seed

    def root(self, model: str, lora: str | None = None, cache_salt: str | None = None) -> bytes:
        """Return ``H_{-1}``, 16 bytes. Fields are length-prefixed, so no two settings can collide by concatenation."""
        parts = [self.chunk_tokens.to_bytes(4, "little")]
        for field in (model, lora, cache_salt):
            raw = b"" if field is None else field.encode("utf-8", "surrogatepass")
            parts += [b"\0" if field is None else b"\1", len(raw).to_bytes(4, "little"), raw]
        return _digest(b"".join(parts), self.seed)

    def next(self, parent: bytes, tokens: bytes | memoryview, extra: bytes = b"") -> bytes:
        """Return the hash of one chunk: ``tokens`` is exactly ``chunk_bytes`` long, packed little-endian u32."""
        return _digest(b"".join((parent, tokens, extra)), self.seed)

    def chain(
        self, parent: bytes, tokens: bytes | memoryview, extras: Mapping[int, bytes] | None = None
    ) -> list[bytes]:
        """Return the hashes of all whole chunks in ``tokens``; a tail shorter than a chunk is not hashed.

        Args:
            parent: ``root(...)``, or the last hash of the chain that this run continues.
            tokens: packed little-endian u32 token ids, ``4 * n`` bytes.
            extras: chunk number (from 0, within this run) → ``media_extra`` of the chunk.
        """
        size, seed, digest = self.chunk_bytes, self.seed, _digest
        hashes = []
        if extras:
            for number, start in enumerate(range(0, len(tokens) - size + 1, size)):
                parent = self.next(parent, tokens[start : start + size], extras.get(number, b""))
                hashes.append(parent)
            return hashes
        # hot path: `next` inlined, one call less per chunk
        for start in range(0, len(tokens) - size + 1, size):
            parent = digest(parent + tokens[start : start + size], seed)
            hashes.append(parent)
        return hashes
