"""What LMCache's multi-process servers tell, in JSON as their protocol has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.events.decode import Removed, Stored
from gateway.events.lmcache import BadDirectoryEvents, DirectoryBatch, decode_directory
from policies.base import Tier
from tests.events_rig import packed, tokens

PROMPT = tokens(8)


def entry(name: str, ids: list[int] | None = None, offset: int = 0, **key: Any) -> dict[str, Any]:
    whole = {
        "chunk_hash_hex": name,
        "model_name": "tiny",
        "kv_rank": 0,
        "object_group_id": 0,
        "cache_salt": "",
    }
    return {"key": whole | key, "size_bytes": 1 << 20, "token_ids": ids, "token_offset": offset}


def body(*entries: dict[str, Any], **fields: Any) -> bytes:
    batch = {
        "instance_id": "w",
        "incarnation": 1,
        "seq": 1,
        "event_type": "store",
        "tier": "l1",
        "backend": "dram",
        "entries": list(entries),
        "shared": False,
        "ts": 1.5,
    }
    return json.dumps({"batches": [batch | fields]}).encode()


def only(raw: bytes) -> DirectoryBatch:
    (batch,) = decode_directory(raw)
    return batch


def test_chunks_of_a_prompt_follow_on_each_other() -> None:
    batch = only(body(entry("3c", PROMPT[:4]), entry("9f", PROMPT[4:], 4), entry("aa", PROMPT[:4])))
    assert batch.events() == (
        [
            Stored(["lmcache:dram::3c"], None, packed(PROMPT[:4]), 4, Tier.HOST),
            Stored(["lmcache:dram::9f"], "lmcache:dram::3c", packed(PROMPT[4:]), 4, Tier.HOST),
            Stored(["lmcache:dram::aa"], None, packed(PROMPT[:4]), 4, Tier.HOST),
        ],
        0,
    )


def test_the_salt_is_in_the_name_and_in_the_first_chunk() -> None:
    batch = only(body(entry("3c", PROMPT[:4], cache_salt="t"), entry("9f", PROMPT[4:], 4, cache_salt="t")))
    first, second = batch.events()[0]
    assert first == Stored(["lmcache:dram:t:3c"], None, packed(PROMPT[:4]), 4, Tier.HOST, salt="t")
    assert second == Stored(["lmcache:dram:t:9f"], "lmcache:dram:t:3c", packed(PROMPT[4:]), 4, Tier.HOST)


def test_other_ranks_and_groups_say_the_same_again() -> None:
    batch = only(body(entry("3c", PROMPT[:4]), entry("3c", PROMPT[:4], kv_rank=1), entry("3c", object_group_id=1)))
    assert len(batch.events()[0]) == 1


@pytest.mark.parametrize(
    "second",
    [entry("9f", PROMPT[4:], 8), entry("9f", None, 4), entry("9f", None, 0)],
    ids=["a hole before it", "no tokens", "no tokens at the beginning"],
)
def test_what_cannot_be_placed_is_skipped_with_all_that_follows_on_it(second: dict[str, Any]) -> None:
    batch = only(body(entry("3c", PROMPT[:4]), second, entry("dd", PROMPT[4:], 4)))
    events, skipped = batch.events()
    assert ([event.hashes for event in events], skipped) == ([["lmcache:dram::3c"]], 2)


@pytest.mark.parametrize(
    ("tier", "backend", "shared", "where"),
    [
        ("l1", "dram", False, Tier.HOST),
        ("l1", "cxl", False, Tier.HOST),
        ("l2", "fs", False, Tier.DISK),
        ("l2", "fs", True, Tier.REMOTE),
        ("l2", "valkey", True, Tier.REMOTE),
        ("l2", "s3", False, Tier.REMOTE),
    ],
)
def test_tiers_are_a_routers(tier: str, backend: str, shared: bool, where: Tier) -> None:
    batch = only(body(entry("3c"), event_type="delete", tier=tier, backend=backend, shared=shared))
    assert batch.events() == ([Removed([f"lmcache:{backend}::3c"], where)], 0)


@pytest.mark.parametrize("kind", ["access", "config", "something new"])
def test_other_events_change_nothing(kind: str) -> None:
    assert only(body(entry("3c", PROMPT[:4]), event_type=kind)).events() == ([], 0)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"batches": [{}]}', body({"key": 3})])
def test_something_else_is_refused(raw: bytes) -> None:
    with pytest.raises(BadDirectoryEvents):
        decode_directory(raw)


def test_a_token_that_is_none_is_refused() -> None:
    with pytest.raises(BadDirectoryEvents):
        only(body(entry("3c", [2**32]))).events()
