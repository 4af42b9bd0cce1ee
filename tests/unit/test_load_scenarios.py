"""What a load test sends: the same for the same seed, with text that is equal exactly where the blocks are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.load.scenario import Scenario, read_scenario
from sim.load.text import WORD_CHARS, WORDS, block_text, prompt_text

SOURCES = (
    "chat:sessions=4",
    "tenants:requests=9,tenants=2",
    "rag:requests=9,documents=3",
    "agents:sessions=2,turns=3",
    "bursts:bursts=2,copies=3",
    "code:sessions=2,turns=3",
)


def scenario(source: str, seed: int = 0, **options: Any) -> Scenario:
    return read_scenario(source, seed, **options)


def requests(made: Scenario) -> list[tuple[str, dict[str, Any]]]:
    return [made.request(turn.number) for unit in made.units for turn in unit.turns]


def shared_chars(one: str, other: str) -> int:
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), len(one))


def mooncake(path: Path, *lines: tuple[int, list[int]]) -> Path:
    entries = [
        {"timestamp": 3000 * number, "input_length": tokens, "output_length": 5, "hash_ids": ids}
        for number, (tokens, ids) in enumerate(lines)
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_seed_sends_the_same(source: str) -> None:
    one, same, other = scenario(source, 1), scenario(source, 1), scenario(source, 2)
    assert requests(one) == requests(same)
    assert one.units == same.units
    assert requests(one) != requests(other)


def test_words_are_one_token_each_where_four_bytes_are_one() -> None:
    assert len(set(WORDS)) == 64
    assert {len(word) + 1 for word in WORDS} == {WORD_CHARS}


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(11, 600))
def test_texts_of_blocks_are_equal_where_their_ids_are(one: int, other: int, words: int) -> None:
    assert len(block_text(one, words)) == words * WORD_CHARS
    assert (block_text(one, words) == block_text(other, words)) == (one == other)


@given(st.lists(st.integers(0, 2**63 - 1), max_size=4), st.integers(16, 64), st.integers(1, 300))
def test_a_prompt_is_as_long_as_its_request_whatever_is_named(blocks: list[int], block: int, words: int) -> None:
    text = prompt_text(blocks, block, 7, words)
    assert len(text) == words * WORD_CHARS
    assert text.startswith("".join(block_text(each, block) for each in blocks)[: len(text)])


def test_a_trace_shares_text_where_it_shares_blocks(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "trace.jsonl", (1300, [1, 2, 3]), (1500, [1, 2, 4]), (600, [5, 6]))
    made = scenario(str(file), api="completions")
    texts = [made.request(number)[1]["prompt"] for number in range(3)]
    assert [len(text) // WORD_CHARS for text in texts] == [1300, 1500, 600]
    assert 1024 * WORD_CHARS <= shared_chars(texts[0], texts[1]) < 1036 * WORD_CHARS
    assert shared_chars(texts[1], texts[2]) < 11 * WORD_CHARS


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    head = {"kvway_trace": 1, "recording": "r", "started": "2026-01-01T00:00:00Z", "chunk_tokens": 64}
    lines = [
        {
            "t": 0.5 * turn,
            "input": 130 + 70 * turn,
            "ids": [1, 2, 3][: 2 + turn],
            "limit": 9,
            "duration": 0.2,
            "output": 5,
        }
        for turn in range(2)
    ]
    file = tmp_path / "kvway-1.jsonl"
    file.write_text("\n".join(map(json.dumps, [head, *({**line, "session": 1} for line in lines)])))
    made = scenario(str(file))
    first, second = (request[1]["messages"] for request in requests(made))
    assert [len(unit.turns) for unit in made.units] == [2]
    assert second[: len(first)] == first
    assert made.units[0].turns[1].think_s == pytest.approx(0.3)


def test_later_turns_repeat_the_messages_of_earlier_ones() -> None:
    made = scenario("chat:sessions=8,turns=5,message_tokens=90,output_tokens=30", 3)
    assert max(len(unit.turns) for unit in made.units) > 2
    for unit in made.units:
        earlier: list[dict[str, str]] = []
        for position, turn in enumerate(unit.turns):
            messages = made.request(turn.number)[1]["messages"]
            assert messages[: len(earlier)] == earlier
            assert [message["role"] for message in messages] == ["user", "assistant"] * position + ["user"]
            earlier = messages


def test_the_loop_says_what_waits_for_what() -> None:
    chat = "chat:sessions=5,turns=4"
    closed, sessions, free = (scenario(chat, loop=loop) for loop in ("", "sessions", "open"))
    assert (closed.paced, sessions.paced, free.paced) == (False, True, True)
    assert closed.units == sessions.units
    assert all(len(unit.turns) == 1 for unit in free.units)
    assert scenario("rag:requests=3").paced


@pytest.mark.parametrize("source", ["tenants:requests=9", "chat:sessions=4,turns=3", "code:sessions=3,turns=3,lines=2"])
@pytest.mark.parametrize("first", [1, 4, 1000])
def test_the_first_requests_are_sent_of_every_scenario(source: str, first: int) -> None:
    whole, begun = (requests(scenario(source, first=number)) for number in (0, first))
    assert len(begun) == min(first, len(whole))


def test_more_load_comes_sooner() -> None:
    slow, quick = (scenario("rag:requests=5", load=load).units for load in (1.0, 4.0))
    assert [unit.due_s for unit in quick] == pytest.approx([unit.due_s / 4 for unit in slow])


@pytest.mark.parametrize(
    ("source", "options", "complaint"),
    [
        ("chta", {}, "Did you mean 'chat'"),
        ("code:turns=0", {}, r"turns.*Keys: sessions"),
        ("code:size=3", {}, "size"),
        ("code", {"api": "completions"}, "chats"),
        ("code", {"loop": "open"}, "wait"),
        ("missing.jsonl", {}, "missing.jsonl"),
        ("chat", {"loop": "round"}, "closed, sessions, open"),
        ("chat", {"api": "responses"}, "chat, completions"),
        ("code", {"load": 0}, "above 0"),
    ],
)
def test_what_cannot_be_sent_is_said(source: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        scenario(source, **options)


def test_a_request_of_no_conversation_is_one_message(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "trace.jsonl", (600, [1, 2]))
    [(path, body)] = requests(scenario(str(file)))
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["user"]
