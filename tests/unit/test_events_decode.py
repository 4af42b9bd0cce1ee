from __future__ import annotations

import msgspec
import pytest

from gateway.events.decode import BadFrames, Cleared, Removed, Stored, decode_batch, parse_publication, parse_replay
from policies.base import Tier
from tests import golden
from tests.events_rig import CLEARED, batch, packed, removed, stored


def only(event: object) -> object:
    """Decode a batch of one event."""
    decoded = decode_batch(batch(event))
    assert (decoded.bad, decoded.skipped) == (0, 0)
    (known,) = decoded.events
    return known


def test_a_map_event_of_a_current_vllm():
    event = only(stored([2**64 - 1, 7], [1, 2, 3, 4], parent=5))
    assert event.hashes == [2**64 - 1, 7]
    assert event.parent == 5
    assert event.tokens == packed([1, 2, 3, 4])
    assert (event.block_size, event.tier, event.group) == (2, Tier.HBM, 0)
    assert (event.lora, event.salt, event.extras) == (None, None, None)


@pytest.mark.parametrize("length", range(6, 13))
def test_an_array_event_of_an_older_vllm_may_end_early(length):
    full = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "CPU", "adapter", None, 0, "full_attention", None]
    event = only(full[:length])
    assert event.tokens == packed([1, 2, 3, 4])
    assert event.tier == (Tier.HOST if length > 6 else Tier.HBM)
    assert event.lora == ("adapter" if length > 7 else None)
    assert event.group == (0 if length > 9 else None)


def test_removals_and_resets_as_arrays():
    assert only(["BlockRemoved", [3], "GPU"]).tier is Tier.HBM
    assert only(["BlockRemoved", [3]]).tier is None
    assert isinstance(only(["AllBlocksCleared"]), Cleared)


def test_a_removal_without_medium_is_for_every_tier():
    assert only(removed([3], medium=None)).tier is None
    assert only({"type": "BlockRemoved", "block_hashes": [3]}).tier is None


def test_a_batch_may_be_a_map_and_have_no_rank():
    payload = msgspec.msgpack.encode({"ts": 2.5, "events": [CLEARED]})
    assert decode_batch(payload).time_s == 2.5
    assert decode_batch(msgspec.msgpack.encode([2.5, [CLEARED]])).events


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (1795961069.05, 1795961069.05),
        (1795961069, 1795961069.0),
        (1795961069050, 1795961069.05),
        (None, 0.0),
        ("x", 0.0),
    ],
)
def test_times_are_float_or_integer_seconds_or_milliseconds(written, seconds):
    assert decode_batch(batch(CLEARED, at=written)).time_s == pytest.approx(seconds)


def test_a_time_that_is_no_number_counts_as_none():
    assert decode_batch(batch(CLEARED, at=float("nan"))).time_s == 0.0


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.HBM),
        ("GPU", Tier.HBM),
        ("CPU", Tier.HOST),
        ("cpu", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.DISK),
        ("disk", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("EXTERNAL", Tier.REMOTE),
        ("a tier of next year", Tier.REMOTE),
    ],
)
def test_tier_names_of_every_engine(medium, tier):
    assert only(stored([1], [1, 2], medium=medium)).tier is tier
    if medium is not None:
        assert only(removed([1], medium=medium)).tier is tier


def test_what_lies_on_another_machine_is_remote_whatever_its_medium():
    assert only(stored([1], [1, 2], medium="STORAGE", locality="REMOTE")).tier is Tier.REMOTE
    assert only(stored([1], [1, 2], medium="CPU", locality="LOCAL")).tier is Tier.HOST
    assert only(removed([1], medium="STORAGE", locality="REMOTE")).tier is Tier.REMOTE
    assert only(removed([1], medium=None, locality="REMOTE")).tier is Tier.REMOTE


def test_hashes_of_32_bytes():
    assert only(stored([b"a" * 32], [1, 2], parent=b"b" * 32)).hashes == [b"a" * 32]


def test_a_signed_hash_is_the_same_as_its_unsigned_form():
    assert only(stored([-1, 5], [1, 2], parent=-(2**63))).hashes == [2**64 - 1, 5]
    assert only(stored([-1], [1, 2], parent=-(2**63))).parent == 2**63
    assert only(removed([-1])).hashes == [2**64 - 1]


def test_an_event_of_sglang():
    event = only(
        {
            "type": "BlockStored",
            "block_hashes": [8635429971592222890],
            "parent_block_hash": None,
            "token_ids": list(range(1, 17)),
            "block_size": 16,
            "lora_id": None,
            "medium": "CPU_PINNED",
            "cache_salt": "tenant",
        }
    )
    assert (event.tier, event.salt, event.group) == (Tier.HOST, "tenant", None)


def test_pairs_of_tokens_count_as_their_first():
    assert only(stored([1], [[7, 8], [8, 9]])).tokens == packed([7, 8])


def test_an_event_under_mooncakes_names():
    event = only(
        {
            "event_type": "stored",
            "seq_hashes": [1],
            "parent_hash": 4,
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_name": "adapter",
            "additional_salt": "tenant",
            "medium": "disk",
            "event_id": 9,
        }
    )
    assert (event.hashes, event.parent, event.tier) == ([1], 4, Tier.DISK)
    assert (event.lora, event.salt) == ("adapter", "tenant")
    assert isinstance(only({"event_type": "removed", "seq_hashes": [1], "medium": "cpu"}), Removed)
    assert isinstance(only({"event_type": "cleared"}), Cleared)


def test_blocks_from_the_middle_of_nowhere_are_skipped():
    event = {"event_type": "stored", "seq_hashes": [1], "token_ids": [1, 2], "block_size": 2, "base_block_idx": 3}
    decoded = decode_batch(batch(event))
    assert (decoded.events, decoded.skipped) == ([], 1)


def test_a_block_that_is_named_but_not_described():
    event = only(stored([1], [], medium="CPU", block_size=0))
    assert (event.hashes, event.tokens) == ([1], b"")
    assert only(stored([1], [], medium="cpu", block_size=16, token_ids=None)).tokens == b""


def test_the_salt_stands_bare_in_the_first_blocks_extra_keys():
    event = only(stored([1, 2], [1, 2, 3, 4], extra_keys=[["tenant"], None]))
    assert (event.salt, event.extras) == ("tenant", None)


def test_the_adapters_name_comes_first_in_every_blocks_extra_keys():
    event = only(stored([1, 2], [1, 2, 3, 4], lora_name="tenant", extra_keys=[["tenant", "tenant"], ["tenant"]]))
    assert (event.lora, event.salt, event.extras) == ("tenant", "tenant", None)


def test_an_adapter_known_only_by_number_is_not_the_base_model():
    assert only(stored([1], [1, 2], lora_id=3)).lora == "#3"
    assert only(stored([1], [1, 2], lora_id=0)).lora is None


def test_multimodal_items_and_embeddings_are_kept_per_block():
    event = only(
        stored([1, 2, 3], [0] * 6, extra_keys=[[["image", 1], "salt"], [["image", -1], ["two", 0]], [b"digest"]])
    )
    assert event.salt == "salt"
    assert event.extras == [((b"image", 1),), ((b"image", -1), (b"two", 0)), ((b"digest", 0),)]


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "cross_attention", "of 2030"])
def test_groups_that_hold_no_reusable_prefix_are_skipped(kind):
    decoded = decode_batch(batch(stored([1], [1, 2], kv_cache_spec_kind=kind), CLEARED))
    assert (len(decoded.events), decoded.skipped, decoded.bad) == (1, 1, 0)


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention"])
def test_groups_that_hold_reusable_prefixes_count(kind):
    assert only(stored([1], [1, 2], kv_cache_spec_kind=kind))


def test_an_event_says_the_same_whether_its_batch_is_of_the_usual_shape_or_not():
    events = [
        stored([2**64 - 1, -7], [1, 2, 3, 4], parent=-5, lora_id=3, extra_keys=[[["image", 1]], None]),
        stored([b"a" * 32], [1, 2], cache_salt="tenant", locality="REMOTE", ownership="kvcr", session_id="s"),
        stored([1], [1, 2], lora_name="adapter", kv_cache_spec_kind="mla_attention", group_idx=2),
        stored([1], [1, 2]) | {"parent_block_hash": None, "parent_hash": 4, "additional_salt": "tenant"},
        removed([1, 2], medium="CPU"),
        CLEARED,
    ]
    usual, unusual = decode_batch(batch(*events)), decode_batch(batch(*events, {"type": "BlockMoved"}))
    assert usual.events == unusual.events
    assert (usual.skipped, unusual.skipped) == (0, 1)


def test_unknown_types_are_skipped_and_unknown_fields_ignored():
    decoded = decode_batch(
        batch({"type": "BlockMoved", "block_hashes": [1]}, ["BlockMoved", 1], stored([1], [1], new=[{}]))
    )
    assert (len(decoded.events), decoded.skipped, decoded.bad) == (1, 2, 0)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        7,
        "BlockStored",
        {},
        [],
        [[]],
        {"type": []},
        {"type": "BlockStored"},
        stored([1], [1, 2]) | {"block_hashes": 1},
        stored([1], [1, 2]) | {"block_hashes": [[1]]},
        stored([1, 2], [1, 2]) | {"block_hashes": [1, None]},
        stored([1], [1, 2]) | {"block_hashes": [1.5]},
        stored([1], [1, 2]) | {"block_hashes": [True]},
        stored([1], [1, 2], parent=[1]),
        stored([1], [1, 2], token_ids=[1, -2]),
        stored([1], [1, 2], token_ids=[1, 2**32]),
        stored([1], [1, 2], token_ids=["a", "b"]),
        stored([1], [1, 2], token_ids=[1]),
        stored([1], [1, 2], token_ids=7),
        stored([1], [1, 2], token_ids={"a": 1}),
        stored([1], [1, 2], block_size=-2),
        stored([1], [1, 2], block_size=0),
        stored([1], [1, 2], block_size="2"),
        stored([1], [1, 2], medium=3),
        stored([1], [1, 2], group_idx="0"),
        stored([1], [1, 2], kv_cache_spec_kind=[]),
        stored([1], [1, 2], lora_name=3),
        stored([1], [1, 2], extra_keys=[["a"], ["b"]]),
        stored([1], [1, 2], parent=3, extra_keys=[["a"]]),
        stored([1], [1, 2], extra_keys=[[7]]),
        stored([1], [1, 2], extra_keys=[[[]]]),
        removed([1]) | {"block_hashes": None},
        removed([1], medium={}),
    ],
)
def test_a_bad_event_is_counted_and_left_out_alone(bad):
    decoded = decode_batch(batch(stored([1], [1, 2]), bad, removed([1])))
    assert [type(event) for event in decoded.events] == [Stored, Removed]
    assert decoded.bad == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([1.5, 7]),
        msgspec.msgpack.encode({"ts": 1.5}),
        b"\x81\x90\x01",
    ],
)
def test_what_is_no_batch_is_said_to_be_none(payload):
    with pytest.raises(BadFrames):
        decode_batch(payload)


def test_a_publication_has_three_frames():
    assert parse_publication([b"topic", (2**63).to_bytes(8, "big"), b"x"]) == (2**63, b"x")
    for frames in ([], [b"topic", b"x"], [b"", b"short", b"x"], [b"", bytes(8), b"x", b"y"]):
        with pytest.raises(BadFrames):
            parse_publication(frames)


def test_a_replay_answer_has_three_or_four_frames():
    number = (5).to_bytes(8, "big")
    assert parse_replay([b"", number, b"x"]) == (5, b"x")
    assert parse_replay([b"", b"topic", number, b"x"]) == (5, b"x")
    for frames in ([], [number, b"x"], [b"", b"topic", b"short", b"x"], [b"", b"", b"", number, b"x"]):
        with pytest.raises(BadFrames):
            parse_replay(frames)


def test_both_end_markers_end_a_replay():
    end = (-1).to_bytes(8, "big", signed=True)
    assert parse_replay([b"", end, b""]) is None
    assert parse_replay([b"", b"", end, b""]) is None


def test_every_recorded_message_decodes():
    messages = [
        message for run in (golden.requests(), golden.evictions()) for request in run for message in request.messages
    ]
    for message in messages:
        decoded = decode_batch(parse_publication(message.raw)[1])
        assert len(decoded.events) == len(message.events)
        assert (decoded.bad, decoded.skipped) == (0, 0)
    assert len(messages) == 39


def test_the_recorded_replay_is_what_was_published():
    first, answers = golden.replay()
    published = [parse_publication(message.raw) for request in golden.evictions() for message in request.messages]
    assert [parse_replay(frames) for frames in answers] == [*published[first:], None]


def test_a_batch_of_mooncakes_master_has_integer_milliseconds_and_describes_nothing():
    aliases = {"type": "BlockStored", "block_hashes": [-5], "object_key": "tiny@8@0@ff", "group_id": 7}
    empty = dict.fromkeys(("model_name", "block_size", "lora_name", "dp_rank", "token_ids", "parent_hash"))
    standard = {"event_id": 1, "event_type": "removed", "seq_hashes": [2**64 - 5], "medium": "disk", **empty}
    decoded = decode_batch(
        msgspec.msgpack.encode([1_790_000_000_123, [aliases | empty | {"medium": "cpu"}, standard], 0])
    )
    assert decoded.time_s == 1_790_000_000.123
    assert decoded.events == [
        Stored([2**64 - 5], None, b"", 0, Tier.HOST),
        Removed([2**64 - 5], Tier.DISK),
    ]
