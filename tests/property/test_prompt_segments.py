"""A text cut into segments has the ids of the whole text, whatever tokenizer and added tokens."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import tokenizer as module
from gateway.prompt.chains import Chains
from gateway.prompt.reading import Reading
from gateway.prompt.segments import Cutter, Segment, SegmentCache, is_certain
from gateway.prompt.tokenizer import AddedToken, FastEncoder, HuggingFaceEncoder, pack
from policies.chunks import ChunkHasher
from tests.prompt_rig import KINDS, train

# Contents that overlap, contain and extend each other, with and without space and letters at their ends.
CONTENTS = [
    "<a>",
    "<b>",
    "<a>b",
    "x<a",
    "a>",
    "<",
    "<|",
    "|>",
    "<|a|>",
    "<a> ",
    " <b>",
    "<a><b>",
    "[A]",
    "[/A]",
    "A]",
    "ab",
    "▁<",
]
flags = st.booleans()
added_tokens = st.lists(
    st.builds(
        AddedToken,
        content=st.sampled_from(CONTENTS),
        single_word=flags,
        lstrip=flags,
        rstrip=flags,
        normalized=flags,
        special=flags,
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda token: token.content,
)
pieces = st.sampled_from(
    [*CONTENTS, " ", "  ", "\n", "a", "b", "x", "word", "The quick", "é", "日本", "👍🏽", "12", "'s", "▁", "."]
)
texts = st.lists(pieces, max_size=14).map("".join)


@cache
def trained(kind: str) -> str:
    return train(kind, []).to_str()


def with_tokens(kind: str, added: list[AddedToken]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(trained(kind))
    tokenizer.add_tokens(
        [tokenizers.AddedToken(**{name: getattr(token, name) for name in AddedToken.__slots__}) for token in added]
    )
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@given(added=added_tokens, texts=st.lists(texts, min_size=1, max_size=8))
def test_cut_texts_have_the_ids_of_whole_ones(kind, added, texts):
    tokenizer = with_tokens(kind, added)
    cutter = Cutter([token.content for token in added if is_certain(token, added)])
    encoder = HuggingFaceEncoder(tokenizer)
    for text in texts:
        segments = cutter.cut(text)
        assert "".join(segments) == text
        assert b"".join(encoder.encode(segments)) == pack(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.skipif(module.fastokens is None, reason="there is no fastokens for this platform")
@pytest.mark.parametrize("kind", ["byte-level", "split", "prepend"])
@given(
    certain=st.lists(st.sampled_from(["<a>", "<b>", "<|c|>", "[D]", "[/D]"]), min_size=1, unique=True), data=st.data()
)
def test_fastokens_gives_the_same_ids_for_cut_texts(kind, certain, data):
    added = [AddedToken(content, special=True, normalized=False) for content in certain]
    tokenizer = with_tokens(kind, added)
    fast = FastEncoder(module.fastokens.Tokenizer.from_json_str(tokenizer.to_str()))
    cutter = Cutter(certain)
    text = data.draw(st.lists(st.sampled_from(certain) | pieces | st.text(max_size=8), max_size=14).map("".join))
    assert b"".join(fast.encode(cutter.cut(text))) == pack(tokenizer.encode(text, add_special_tokens=False).ids)


# Conversations as lists of segments; each segment as its ids, and whether it is taken for one that was met before.
conversations = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=9), flags), max_size=8), min_size=1, max_size=6
)


def segments_of(run: list[tuple[list[int], bool]], known: dict[tuple[int, ...], Segment]) -> list[Segment]:
    """The segments of one conversation, the same objects for the same ids."""
    segments = []
    for ids, used in run:
        segment = known.setdefault(tuple(ids), Segment(pack(ids)))
        segment.used = used
        segments.append(segment)
    return segments


@given(runs=conversations, chunk_tokens=st.integers(1, 5), max_bytes=st.sampled_from([0, 4_000, 2**20]))
async def test_extended_chains_are_those_of_the_whole_sequence(runs, chunk_tokens, max_bytes):
    hasher = ChunkHasher(chunk_tokens)
    chains = Chains(hasher, max_bytes)
    known: dict[tuple[int, ...], Segment] = {}
    for run in runs:
        segments = segments_of(run, known)
        whole = b"".join(segment.ids for segment in segments)
        assert await chains.hashes(chains.root("m", None, None), segments) == hasher.chain(hasher.root("m"), whole)


@given(runs=conversations, kept=st.lists(st.integers(0, 8), min_size=6, max_size=6), chunk_tokens=st.integers(1, 5))
async def test_what_goes_on_with_a_reading_is_what_it_would_be_alone(runs, kept, chunk_tokens):
    hasher = ChunkHasher(chunk_tokens)
    chains = Chains(hasher, 2**20)
    known: dict[tuple[int, ...], Segment] = {}
    encoder = HuggingFaceEncoder(with_tokens("byte-level", []))
    with ThreadPoolExecutor(1) as executor:
        reading = Reading(SegmentCache(encoder, 0, executor), chains.root("m", None, None))
    for run, n_kept in zip(runs, kept, strict=False):
        n_kept = min(n_kept, len(reading.texts))
        added = segments_of(run, known)
        texts = [*reading.texts[:n_kept], *(f"text {segment.number}" for segment in added)]
        parts = [*reading.parts[:n_kept], *(segment.ids for segment in added)]
        reading = await reading.going_on(texts, n_kept, added, chains)
        assert reading.common(texts) == len(texts)
        assert (reading.parts, reading.tokens) == (parts, len(b"".join(parts)) // 4)
        assert reading.hashes == hasher.chain(hasher.root("m"), b"".join(parts))


@given(
    requests=st.lists(st.lists(texts, max_size=6), min_size=1, max_size=8), max_bytes=st.sampled_from([0, 2_000, 2**20])
)
def test_cached_ids_are_those_of_the_encoder(requests, max_bytes):
    encoder = HuggingFaceEncoder(with_tokens("byte-level", []))
    with ThreadPoolExecutor(1) as executor:
        cache = SegmentCache(encoder, max_bytes, executor)
        for request in requests:
            found = asyncio.run(cache.get(request))
            assert [segment.ids for segment in found] == encoder.encode(request)
            assert cache.known.bytes <= max_bytes
