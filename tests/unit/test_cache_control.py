"""The parts of ``kvway cache`` that need no fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from gateway.cache_commands import has_come_whole, is_cleared, read_prompt
from gateway.events.ages import EvictionAges

CHUNKS = [bytes([0] * 15 + [last]) for last in range(256)]


@pytest.mark.parametrize(
    ("content", "body"),
    [
        ("Once upon a time", {"prompt": "Once upon a time"}),
        ('{"prompt": "x", "model": "m"}', {"prompt": "x", "model": "m"}),
        ('[{"role": "user", "content": "Hi"}]', {"messages": [{"role": "user", "content": "Hi"}]}),
        ("42", {"prompt": "42"}),
    ],
)
def test_a_prompt_is_a_request_or_its_messages_or_plain_text(tmp_path: Path, content: str, body: object) -> None:
    file = tmp_path / "prompt"
    file.write_text(content)
    assert json.loads(read_prompt(file, None, "")) == body


def test_a_model_is_named_only_where_the_request_names_none(tmp_path: Path) -> None:
    assert json.loads(read_prompt(None, "[1, 2]", "m")) == {"prompt": "[1, 2]", "model": "m"}
    file = tmp_path / "prompt"
    file.write_text('{"prompt": "x", "model": "its own"}')
    assert json.loads(read_prompt(file, None, "m"))["model"] == "its own"


def test_a_prefetch_is_done_only_when_all_has_come() -> None:
    assert has_come_whole({"by": "warm-up", "tokens": 64, "cached_tokens": None})
    assert has_come_whole({"by": "coordinator", "found_keys": 4, "total_keys": 4})
    assert not has_come_whole({"by": "coordinator", "found_keys": 3, "total_keys": 4})
    assert not has_come_whole({"by": "coordinator", "found_keys": None, "total_keys": None})


def test_a_clear_is_done_only_when_nothing_refused() -> None:
    assert is_cleared({"worker": "w", "engine": "cleared", "lmcache": None, "index": "cleared"})
    assert is_cleared({"worker": "w", "deleted_keys": 0, "kept_keys": 0})
    assert not is_cleared({"worker": "w", "engine": "It cannot.", "lmcache": None, "index": None})
    assert not is_cleared({"worker": "w", "engine": "cleared", "lmcache": "It cannot.", "index": "cleared"})
    assert not is_cleared({"worker": "w", "problem": "It cannot."})


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_wrong_usage(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "prompt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(typer.Exit) as ended:
        read_prompt(file, None, "")
    assert ended.value.exit_code == 2


def test_the_age_of_chunks_is_that_at_which_they_are_evicted() -> None:
    ages = EvictionAges()
    ages.stored(CHUNKS, 10.0)
    assert ages.median_s is None
    ages.evicted(CHUNKS[:128], 40.0)
    assert ages.median_s == 30.0
    ages.evicted(CHUNKS[:128], 90.0)  # they are gone already
    assert ages.median_s == 30.0
    ages.stored(CHUNKS[128:], 100.0)  # written again, they are young again
    ages.evicted(CHUNKS[128:], 101.0)
    assert ages.median_s == 15.5
