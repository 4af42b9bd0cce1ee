"""The model of a prefix cache: what goes first, and what room is taken by what cannot be named."""

from __future__ import annotations

from policies.recency import Prefixes, PrefixLru

CHUNK = 100


def test_the_least_recently_used_prompt_goes_first_and_from_its_end() -> None:
    cache: PrefixLru[str] = PrefixLru(CHUNK)
    assert cache.ended(["a1", "a2", "a3"], 0, 500) == (["a1", "a2", "a3"], [])
    assert cache.ended(["b1", "b2", "b3"], 0, 500) == (["b1", "b2", "b3"], [("a3", "a1")])
    assert cache.ended(["a1", "a2"], 0, 400) == ([], [("b3", "b1")])


def test_rests_and_answers_take_room_and_go_before_their_prompt() -> None:
    cache: PrefixLru[str] = PrefixLru(CHUNK)
    cache.ended(["a1"], 150, 400)
    assert cache.ended(["b1", "b2"], 0, 350) == (["b1", "b2"], [])
    assert cache.ended(["c1"], 0, 350) == (["c1"], [("a1", "a1")])


def test_a_prompt_that_does_not_fit_keeps_its_beginning() -> None:
    cache: PrefixLru[int] = PrefixLru(CHUNK)
    new, gone = cache.ended(list(range(5)), 80, 300)
    assert new == [0, 1, 2, 3, 4]
    assert gone == [(4, 0), (3, 0)]


def test_what_running_prompts_hold_leaves_less_room() -> None:
    cache: PrefixLru[str] = PrefixLru(CHUNK)
    cache.ended(["a1", "a2", "a3"], 0, 500)
    running = {"a1", "r2", "r3"}
    assert cache.ended(["b1"], 0, 500, running) == (["b1"], [("a3", "a1")])
    assert cache.ended(["a1", "r2", "r3"], 0, 400) == (["r2", "r3"], [("a2", "a1")])


def test_prompts_are_counted_in_and_out_with_what_they_share() -> None:
    prompts: Prefixes[str] = Prefixes()
    for chunks in (["a", "b", "c"], ["a", "b", "d"], ["a"], ["a", "b", "c"]):
        prompts.add(chunks)
    assert prompts.chunks() == {"a", "b", "c", "d"}
    prompts.remove(["a", "b", "c"])
    prompts.remove(["a", "b", "d"])
    assert prompts.chunks() == {"a", "b", "c"}
    prompts.remove(["a", "b", "c"])
    assert prompts.chunks() == {"a"}
    prompts.remove(["a"])
    assert prompts.chunks() == set()


def test_a_cache_without_room_ends_empty() -> None:
    cache: PrefixLru[int] = PrefixLru(CHUNK)
    assert cache.ended([1], 10, 0) == ([1], [(1, 1)])
    assert cache.ended([1], 10, 1000) == ([1], [])
