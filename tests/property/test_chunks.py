import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.chunks import ChunkHasher

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
sizes = st.integers(1, 8)
fields = st.none() | st.text(max_size=6)


def packed(ids):
    return np.array(ids, "<u4").tobytes()


@given(tokens, sizes, st.data())
def test_extending_a_chain_equals_hashing_it_whole(ids, size, data):
    hasher = ChunkHasher(size)
    root = hasher.root("model")
    whole = hasher.chain(root, packed(ids))
    known = data.draw(st.integers(0, len(whole)))
    parent = whole[known - 1] if known else root
    assert hasher.chain(parent, packed(ids[known * size :])) == whole[known:]


@given(tokens, sizes)
def test_one_hash_per_whole_chunk_and_all_of_them_differ(ids, size):
    hasher = ChunkHasher(size)
    chain = hasher.chain(hasher.root("model"), packed(ids))
    assert len(chain) == len(ids) // size == len(set(chain))


@given(tokens.filter(len), sizes, st.data())
def test_a_changed_token_changes_its_chunk_and_every_later_one(ids, size, data):
    position = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[position] ^= data.draw(st.integers(1, 2**32 - 1))
    hasher = ChunkHasher(size)
    root = hasher.root("model")
    before, after = hasher.chain(root, packed(ids)), hasher.chain(root, packed(changed))
    first = position // size
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after[first:])


@given(
    tokens,
    st.lists(st.tuples(st.text(max_size=6), fields, fields, sizes), min_size=2, max_size=2, unique=True),
)
def test_caches_that_differ_in_model_adapter_salt_or_chunk_length_share_no_hash(ids, caches):
    chains = []
    for model, lora, salt, size in caches:
        hasher = ChunkHasher(size)
        chains.append(set(hasher.chain(hasher.root(model, lora, salt), packed(ids))))
    assert not chains[0] & chains[1]


@given(tokens, sizes, st.dictionaries(st.integers(0, 10), st.binary(min_size=1, max_size=8), max_size=3), st.data())
def test_extending_a_chain_with_images_equals_hashing_it_whole(ids, size, extras, data):
    hasher = ChunkHasher(size)
    root = hasher.root("model")
    whole = hasher.chain(root, packed(ids), extras)
    known = data.draw(st.integers(0, len(whole)))
    parent = whole[known - 1] if known else root
    later = {number - known: extra for number, extra in extras.items() if number >= known}
    assert hasher.chain(parent, packed(ids[known * size :]), later) == whole[known:]
