from __future__ import annotations

import pytest

from sim.faults import Fault, Faults
from sim.settings import WorkerSettings


def test_the_reserved_block_comes_on_top_of_the_capacity():
    settings = WorkerSettings(block_size=32, capacity_tokens=2030)
    assert settings.usable_tokens == 2016
    assert settings.limits.num_blocks == 64


def test_the_longest_request_is_bounded_by_the_cache():
    assert WorkerSettings(capacity_tokens=4096).context_tokens == 4096
    assert WorkerSettings(capacity_tokens=1_000_000).context_tokens == 131_072
    assert WorkerSettings(max_model_len=2048).context_tokens == 2048


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": "llama"}, "unknown profile"),
        ({"speed": 0}, "speed must be above 0"),
        ({"speed": float("nan")}, "speed must be above 0 and finite, not nan"),
        ({"speed": float("inf")}, "speed must be above 0 and finite, not inf"),
        ({"port": -1}, r"port must be 0 \(any\) to 65535, not -1"),
        ({"port": 65536}, r"port must be 0 \(any\) to 65535, not 65536"),
        ({"model": ""}, "model must not be empty"),
        ({"adapters": ("",)}, "adapters must not be empty names"),
        ({"adapters": ("sim",)}, "adapters must differ from the model and from each other: 'sim'"),
        ({"adapters": ("a", "b", "a")}, "adapters must differ from the model and from each other: 'a'"),
        ({"kv_replay": "tcp://127.0.0.1:0"}, "set kv_events too, or leave kv_replay out"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"stream_interval": 0}, "stream_interval must be at least 1"),
        ({"host_tokens": -1}, "host_tokens must not be negative"),
        ({"role": "prefill"}, "role prefill needs pd"),
        ({"role": "both", "pd": "nixl"}, "role must be one of mixed, prefill, decode, not 'both'"),
        ({"pd": "tcp"}, "pd must be one of nixl, mooncake, sglang, lmcache, not 'tcp'"),
        ({"pd": "lmcache", "lmcache_proxy": "127.0.0.1:7500"}, "lmcache_proxy must be tcp://host:port"),
        ({"link_gb_s": 0}, "link_gb_s and lease_s must be above 0"),
        ({"capacity_tokens": 15}, "at least one block"),
        ({"capacity_tokens": 10**12}, "at most 20,000,000 can be simulated"),
        ({"kv_events": "tcp://127.0.0.1:70000"}, "kv_events tcp://127.0.0.1:70000: ports go up to 65535"),
        ({"kv_events": "tcp://*:5557", "kv_replay": "tcp://*:70000"}, "kv_replay .*: ports go up to 65535"),
        ({"capacity_tokens": 1024, "max_model_len": 2048}, "exceeds the cache of 1024 tokens"),
    ],
)
def test_impossible_settings_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        WorkerSettings(**wrong)


def test_a_fault_meets_as_many_requests_as_it_counts():
    faults = Faults()
    faults.set(Fault("error503", count=2))
    assert [faults.meet("error503") is not None for _ in range(3)] == [True, True, False]


def test_a_fault_of_one_kind_is_not_of_another():
    faults = Faults()
    faults.set(Fault("cut"))
    assert faults.active("cut")
    assert faults.active("slow") is None


def test_looking_at_a_fault_does_not_use_it_up():
    faults = Faults()
    faults.set(Fault("cut", count=1))
    assert faults.active("cut")
    assert faults.meet("cut")
    assert faults.active("cut") is None


def test_a_fault_ends_after_its_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr("sim.faults.time.monotonic", lambda: now)
    faults = Faults()
    faults.set(Fault("slow", seconds=5))
    now = 104.9
    assert faults.active("slow")
    now = 105.0
    assert faults.active("slow") is None


def test_none_ends_all_faults():
    faults = Faults()
    faults.set(Fault("slow"))
    faults.set(Fault("cut"))
    faults.set(Fault("none"))
    assert faults.active("slow") is None
    assert faults.active("cut") is None
