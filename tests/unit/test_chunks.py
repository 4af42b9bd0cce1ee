import mmh3
import numpy as np
import pytest

from policies.chunks import DIGEST_BYTES, ChunkHasher


def packed(*ids):
    return np.array(ids, "<u4").tobytes()


@pytest.fixture
def hasher():
    return ChunkHasher(4)


def test_a_chunk_hashes_its_parent_and_its_tokens_as_little_endian_u32(hasher):
    root = hasher.root("model")
    expected = mmh3.mmh3_x64_128_digest(root + packed(1, 2, 3, 4), 0)
    assert hasher.chain(root, packed(1, 2, 3, 4)) == [expected]
    assert len(expected) == DIGEST_BYTES


def test_a_tail_shorter_than_a_chunk_is_not_hashed(hasher):
    root = hasher.root("model")
    assert hasher.chain(root, packed(1, 2, 3)) == []
    assert hasher.chain(root, packed(*range(11))) == hasher.chain(root, packed(*range(8)))


def test_an_empty_prompt_has_no_chunks(hasher):
    assert hasher.chain(hasher.root("model"), b"") == []


def test_tokens_may_come_as_a_memoryview(hasher):
    root, tokens = hasher.root("model"), packed(*range(8))
    assert hasher.chain(root, memoryview(tokens)[16:]) == hasher.chain(root, packed(4, 5, 6, 7))
    assert hasher.next(root, memoryview(tokens)[:16]) == hasher.chain(root, tokens)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("m",), ("n",)),
        (("m", "lora"), ("m",)),
        (("m", None, "salt"), ("m",)),
        (("m", "x"), ("m", None, "x")),
        (("m", ""), ("m", None)),
        (("ab", "c"), ("a", "bc")),
        (("m", "a", "b"), ("m", "b", "a")),
    ],
)
def test_what_makes_a_different_cache_makes_a_different_root(hasher, one, other):
    assert hasher.root(*one) != hasher.root(*other)


def test_the_chunk_length_and_the_seed_belong_to_the_root(hasher):
    assert ChunkHasher(8).root("m") != hasher.root("m")
    assert ChunkHasher(4, seed=1).root("m") != hasher.root("m")


def test_unpaired_surrogates_in_a_salt_are_hashed_like_any_text(hasher):
    assert hasher.root("m", None, "\ud800") != hasher.root("m", None, "\ud801")


def test_multimodal_content_changes_its_chunk_and_all_after_it(hasher):
    root, tokens = hasher.root("m"), packed(*range(12))
    plain, image, other = (hasher.chain(root, tokens, extras) for extras in (None, {1: b"cat"}, {1: b"dog"}))
    assert plain[0] == image[0] == other[0]
    for number in (1, 2):
        assert len({plain[number], image[number], other[number]}) == 3


def test_no_extras_and_empty_extras_are_the_same(hasher):
    root, tokens = hasher.root("m"), packed(*range(8))
    assert hasher.chain(root, tokens, {}) == hasher.chain(root, tokens, {5: b"beyond"}) == hasher.chain(root, tokens)


def test_a_chunk_has_at_least_one_token():
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, not 0"):
        ChunkHasher(0)
