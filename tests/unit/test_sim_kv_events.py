from __future__ import annotations

from array import array

import msgspec
import pytest

from policies.base import Tier
from sim.cache import AllCleared, BlockRemoved, BlocksStored
from sim.kv_events import encode_batch, event_map

TOKENS = array("I", range(4))


def stored(**changes: object) -> BlocksStored:
    fields = {"hashes": [2**64 - 1, 7], "parent": None, "tokens": TOKENS, "lora": None, "salt": None, "tier": Tier.HBM}
    return BlocksStored(**(fields | changes))


def test_a_hash_above_the_signed_range_stays_unsigned():
    _, [event], _ = msgspec.msgpack.decode(encode_batch([stored()], 1.5, 2))
    assert event["block_hashes"] == [2**64 - 1, 7]


@pytest.mark.parametrize(
    ("identity", "extra_keys"),
    [
        ({}, [None, None]),
        ({"salt": "tenant"}, [["tenant"], None]),
        ({"lora": "adapter"}, [["adapter"], ["adapter"]]),
        ({"lora": "adapter", "salt": "tenant"}, [["adapter", "tenant"], ["adapter"]]),
    ],
)
def test_extra_keys_name_the_adapter_on_every_block_and_the_salt_at_the_root(identity, extra_keys):
    assert event_map(stored(**identity), 2, {"adapter": 3})["extra_keys"] == extra_keys


def test_an_adapter_is_given_by_name_and_number():
    event = event_map(stored(lora="adapter"), 2, {"adapter": 3})
    assert (event["lora_name"], event["lora_id"]) == ("adapter", 3)


@pytest.mark.parametrize(("tier", "medium"), [(Tier.HBM, "GPU"), (Tier.HOST, "CPU")])
def test_tiers_have_the_names_of_the_engine(tier, medium):
    assert event_map(stored(tier=tier), 2, {})["medium"] == medium
    assert event_map(BlockRemoved(7, tier), 2, {})["medium"] == medium


def test_the_older_format_is_the_same_values_without_their_names():
    payload = encode_batch([stored(parent=5), BlockRemoved(7, Tier.HBM), AllCleared()], 1.5, 2, event_format="array")
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            *(
                [
                    "BlockStored",
                    [2**64 - 1, 7],
                    5,
                    [0, 1, 2, 3],
                    2,
                    None,
                    "GPU",
                    None,
                    [None, None],
                    0,
                    "full_attention",
                ],
            ),
            ["BlockRemoved", [7], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        0,
    ]
