"""Cutting texts, caching their ids, and extending chains of hashes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.prompt.cache import ByteCache, Entry
from gateway.prompt.chains import Chains
from gateway.prompt.segments import Cutter, Segment, SegmentCache, choose_tokens, is_certain
from gateway.prompt.tokenizer import AddedToken, pack
from policies.chunks import ChunkHasher
from tests.prompt_rig import TEMPLATE_NAMES, chat_of, template


class CountingEncoder:
    """Encodes a text to the code points of its characters, and counts how often."""

    inline_chars = 20

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, texts):
        self.encoded += texts
        return [pack([ord(char) for char in text]) for text in texts]


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def encoder() -> CountingEncoder:
    return CountingEncoder()


@pytest.fixture
def cache(encoder, executor) -> SegmentCache:
    return SegmentCache(encoder, 2**20, executor)


def raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"normalized": False, **flags})


class TestCertainTokens:
    def test_a_token_that_nothing_overlaps_is_certain(self):
        assert is_certain(raw("<|a|>"), [raw("<|a|>"), raw("<|b|>"), raw("[x]")])

    @pytest.mark.parametrize("flag", ["lstrip", "single_word", "normalized"])
    def test_flags_that_make_a_token_depend_on_its_surroundings_do_not(self, flag):
        token = raw("<|a|>", **{flag: True})
        assert not is_certain(token, [token])

    def test_taking_the_space_behind_it_does_no_harm(self):
        token = raw("<|a|>", rstrip=True)
        assert is_certain(token, [token])

    @pytest.mark.parametrize("content", ["", " <a>", "\n<a>", "a>", "_a", "1", "é"])
    def test_a_token_must_begin_with_a_sign(self, content):
        assert not is_certain(raw(content), [raw(content)])

    @pytest.mark.parametrize("other", ["<|a|>b", "x<|a|>", "x<|", "b<", "<|a|><|a|>"])
    def test_a_token_that_another_may_swallow_is_not_certain(self, other):
        assert not is_certain(raw("<|a|>"), [raw("<|a|>"), raw(other)])

    def test_tokens_that_are_matched_later_cannot_swallow_it(self):
        assert is_certain(raw("<|a|>"), [raw("<|a|>"), raw("x<|a|>", normalized=True)])

    def test_a_token_that_overlaps_itself_is_not_certain(self):
        assert not is_certain(raw("<><"), [raw("<><")])


class TestCutting:
    def test_segments_begin_with_a_token_and_join_to_the_text(self):
        assert Cutter(["<a>", "<b>"]).cut("x<a>y<b><a>z") == ["x", "<a>y", "<b>", "<a>z"]
        assert Cutter(["<a>"]).cut("<a>y") == ["<a>y"]
        assert Cutter(["<a>"]).cut("") == []
        assert Cutter([]).cut("<a>y") == ["<a>y"]

    @pytest.mark.parametrize(
        ("name", "chosen"),
        [
            ("chatml", ["<|im_start|>"]),
            ("llama3", ["<|start_header_id|>"]),
            ("mistral", ["[INST]", "[/INST]"]),
            ("deepseek", ["<｜User｜>", "<｜Assistant｜>"]),
            ("gemma", ["<start_of_turn>"]),
            ("harmony", ["<|start|>"]),
        ],
    )
    def test_the_tokens_that_part_messages_are_chosen(self, name, chosen):
        tokens = (
            "<s> </s> <|begin_of_text|> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
            "[INST] [/INST] <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <start_of_turn> <end_of_turn> "
            "<|start|> <|end|> <|channel|>"
        ).split()
        marks = ["One?", "Two.", "Three!"]
        roles = ["user", "assistant", "user"]
        body = {"messages": [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]}
        example = template(name).render(chat_of(body, template(name)))
        assert choose_tokens([raw(token) for token in tokens], example, marks) == chosen

    @pytest.mark.parametrize("name", TEMPLATE_NAMES)
    def test_without_certain_tokens_nothing_is_cut(self, name):
        assert choose_tokens([raw("<|nowhere|>"), raw("user")], "user\nOne?", ["One?"]) == []


class TestSegmentCache:
    async def test_only_new_text_is_encoded(self, cache, encoder):
        first = cache.find(["ab", "cd"])
        second = cache.find(["ab", "cd", "ef", "ef"])
        assert encoder.encoded == ["ab", "cd", "ef"]
        assert second[:2] == first
        assert [segment.ids for segment in second] == [pack(map(ord, text)) for text in ("ab", "cd", "ef", "ef")]

    async def test_long_new_text_is_not_encoded_on_the_event_loop(self, cache, encoder):
        assert cache.find(["x" * 11, "y" * 10]) is None
        assert encoder.encoded == []
        segments = await cache.tokenize(["x" * 11, "y" * 10])
        assert cache.find(["x" * 11, "y" * 10]) == segments

    async def test_the_same_text_is_encoded_once_for_all_who_wait_for_it(self, cache, encoder):
        text = "long enough for a thread"
        results = await asyncio.gather(*(cache.tokenize([text, "other"]) for _ in range(8)))
        assert sorted(encoder.encoded) == sorted([text, "other"])
        assert all(result == results[0] for result in results)

    async def test_one_who_stops_waiting_does_not_disturb_the_others(self, cache, encoder):
        impatient = asyncio.ensure_future(cache.tokenize(["a text"]))
        await asyncio.sleep(0)
        patient = asyncio.ensure_future(cache.tokenize(["a text"]))
        await asyncio.sleep(0)
        impatient.cancel()
        [segment] = await patient
        assert segment.ids == pack(map(ord, "a text"))
        assert encoder.encoded == ["a text"]

    async def test_a_failure_reaches_everyone_who_waits_and_is_not_remembered(self, cache, encoder, monkeypatch):
        def fail(texts):
            raise ValueError("no")

        monkeypatch.setattr(encoder, "encode", fail)
        results = await asyncio.gather(*(cache.tokenize(["a text"]) for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["no"] * 3
        monkeypatch.undo()
        assert len(await cache.tokenize(["a text"])) == 1

    async def test_without_memory_everything_is_encoded_each_time(self, encoder, executor):
        cache = SegmentCache(encoder, 0, executor)
        assert [len(segment) for segment in cache.find(["ab"])] == [2]
        assert [len(segment) for segment in cache.find(["ab"])] == [2]
        assert encoder.encoded == ["ab", "ab"]


class TestByteCache:
    def test_it_stays_within_its_bound(self):
        cache: ByteCache[int, Entry] = ByteCache(1000)
        for number in range(100):
            cache.put(number, Entry(90))
            assert cache.bytes <= 1000
        assert len(cache) == 11

    def test_what_was_used_since_stays_longer(self):
        cache: ByteCache[str, Entry] = ByteCache(1000)
        for name in "abcd":
            cache.put(name, Entry(250))
        cache.get("a")
        cache.put("e", Entry(250))
        assert [name for name in "abcde" if cache.get(name)] == ["a", "c", "d", "e"]

    def test_an_entry_put_again_replaces_the_old_one(self):
        cache: ByteCache[str, Entry] = ByteCache(1000)
        cache.put("a", Entry(200))
        cache.put("a", Entry(100))
        assert (len(cache), cache.bytes) == (1, 100)

    def test_an_entry_that_would_crowd_out_the_others_is_not_kept(self):
        cache: ByteCache[str, Entry] = ByteCache(1000)
        cache.put("a", Entry(251))
        assert cache.get("a") is None


class TestChains:
    @pytest.fixture
    def hasher(self) -> ChunkHasher:
        return ChunkHasher(4)

    def test_a_chain_is_extended_not_recomputed(self, hasher, monkeypatch):
        chains = Chains(hasher, 2**20)
        root = chains.root("m", None, None)
        segments = [Segment("", pack(range(start, start + 10))) for start in range(5)]
        first = chains.hashes(root, segments[:4])
        hashed: list[int] = []
        chain = ChunkHasher.chain

        def counting_chain(self, parent, tokens):
            hashed.append(len(tokens))
            return chain(self, parent, tokens)

        monkeypatch.setattr(ChunkHasher, "chain", counting_chain)
        longer = chains.hashes(root, segments)
        assert longer[: len(first)] == first
        assert hashed == [4 * 10]  # the new segment; nothing was left over of the 40 tokens before it

    def test_the_same_segments_after_another_beginning_are_another_chain(self, hasher):
        chains = Chains(hasher, 2**20)
        one, other, shared = (Segment("", pack(range(start, start + 4))) for start in range(3))
        root = chains.root("m", None, None)
        assert chains.hashes(root, [one, shared])[1] != chains.hashes(root, [other, shared])[1]

    @pytest.mark.parametrize("identity", [("n", None, None), ("m", "l", None), ("m", None, "s"), ("m", None, "")])
    def test_model_adapter_and_salt_separate_chains(self, hasher, identity):
        chains = Chains(hasher, 2**20)
        segment = Segment("", pack(range(4)))
        assert chains.hashes(chains.root(*identity), [segment]) != chains.hashes(
            chains.root("m", None, None), [segment]
        )

    def test_hashes_are_right_when_nothing_is_kept(self, hasher):
        chains = Chains(hasher, 0)
        root = chains.root("m", None, None)
        segments = [Segment("", pack(range(7))), Segment("", pack(range(6)))]
        expected = hasher.chain(hasher.root("m"), pack([*range(7), *range(6)]))
        assert chains.hashes(root, segments) == chains.hashes(root, segments) == expected
