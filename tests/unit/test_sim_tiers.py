"""Tiers below HBM: what they catch, what it takes to bring it back, and when that is not worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.base import Tier
from sim.engine import simulate
from sim.fleet import DisaggregationSettings, FleetSettings, TierSettings, host_tier
from sim.index import FleetIndex, Speculations
from sim.profiles import find_profile
from sim.requests import SimRequest, Trace
from sim.tiers import EVERYONE, Channel, TierStack, TierStore, make_stacks

BLOCK = 64
PROFILE = find_profile("llama-3.1-70b/h100/4")
BLOCK_BYTES = float(BLOCK * PROFILE.kv_bytes_per_token)
HOST = host_tier(PROFILE, 64 * BLOCK)
DISK = TierSettings(
    name="nvme", tier=Tier.DISK, capacity_tokens=1024 * BLOCK, read_bytes_per_s=7e9, write_bytes_per_s=5e9
)
POOL = replace(DISK, name="pool", tier=Tier.REMOTE, read_bytes_per_s=20e9, write_bytes_per_s=20e9, shared=True)


def stack(*tiers: TierSettings, **settings: object) -> TierStack:
    return make_stacks(FleetSettings(workers=1, tiers=tiers, **settings), BLOCK)[0]  # type: ignore[arg-type]


def two_prompts(fleet: FleetSettings, prompt_tokens: int = 16_384) -> tuple[list[int], float]:
    """Serve a prompt, push it out of HBM by others, serve it again; return the last hits by tier, and its TTFT."""
    blocks = prompt_tokens // BLOCK
    requests = [
        SimRequest(40.0 * at, range(at * blocks, (at + 1) * blocks), prompt_tokens, 1, session=str(at))
        for at in (0, 1, 2)
    ]
    requests.append(SimRequest(200.0, range(blocks), prompt_tokens, 1))
    result = simulate(Trace(requests, BLOCK), fleet, "round-robin")
    return result.hit_tokens[3].tolist(), float(result.ttft_s[3])


def one_worker(*tiers: TierSettings, **settings: object) -> FleetSettings:
    return FleetSettings(workers=1, capacity_tokens=16_384 + BLOCK, tiers=tiers, **settings)  # type: ignore[arg-type]


def test_without_tiers_what_was_evicted_is_computed_again():
    hits, ttft_s = two_prompts(one_worker())
    assert sum(hits) == 0
    assert ttft_s == pytest.approx(PROFILE.ttft_s(8192) + PROFILE.ttft_s(8192, 8192))


@pytest.mark.parametrize("offload", ["store", "evict"])
def test_host_memory_gives_back_what_hbm_has_lost(offload):
    hits, ttft_s = two_prompts(one_worker(host_tier(PROFILE, 200_000), offload=offload))
    assert sum(hits) == 16_384 - 16
    assert hits[Tier.HOST] > 16_000
    reload_s = 1e-3 + hits[Tier.HOST] * PROFILE.kv_bytes_per_token / (4 * 45e9)
    # the reload, and the one block of the engine that is computed in any case
    assert ttft_s == pytest.approx(reload_s + PROFILE.ttft_s(16, 16_368), rel=0.4)
    assert ttft_s < PROFILE.ttft_s(8192) / 5


def test_compression_moves_fewer_bytes_and_pays_for_it():
    plain, halved = (TierStore(replace(DISK, compression=share), BLOCK, BLOCK_BYTES) for share in (1.0, 0.5))
    assert halved.capacity == 2 * plain.capacity
    paying = TierStore(replace(DISK, compression=0.5, codec_bytes_per_s=1e9), BLOCK, BLOCK_BYTES)
    for store in (plain, halved, paying):
        store.store(range(10), now=0.0, ready_at=0.0)
    assert halved.reload_s(range(10), 1.0) == pytest.approx(plain.reload_s(range(10), 1.0) / 2)
    assert paying.reload_s(range(10), 1.0) == pytest.approx(halved.reload_s(range(10), 1.0) + 10 * BLOCK_BYTES / 1e9)


def test_a_slow_link_is_left_alone_where_computing_is_sooner():
    slow = replace(DISK, name="ethernet", read_bytes_per_s=2.5e9, write_bytes_per_s=50e9, capacity_tokens=200_000)
    hits, ttft_s = two_prompts(one_worker(slow))
    assert hits[Tier.DISK] == 0
    assert ttft_s == pytest.approx(PROFILE.ttft_s(8192) + PROFILE.ttft_s(8192, 8192))
    fast = replace(slow, read_bytes_per_s=25e9)
    assert two_prompts(one_worker(fast))[0][Tier.DISK] > 16_000


def test_layers_hide_a_reload_behind_the_prefill_after_it():
    delays = []
    for layers in (1, 80):
        tiers = stack(replace(HOST, capacity_tokens=10**6), layers=layers)
        tiers.computed(range(100), 0.0)
        plan = tiers.plan(range(100), 0, 100 * BLOCK, tokens=100 * BLOCK + 8000, now=5.0)
        assert plan.runs == [(Tier.HOST, 100)]
        delays.append(plan.ready_at - 5.0)
    reload_s = 1e-3 + 100 * BLOCK_BYTES / (4 * 45e9)
    assert delays[0] == pytest.approx(reload_s)
    assert delays[1] == pytest.approx(reload_s / 80)


def test_a_prefix_is_reloaded_only_as_far_as_that_gets_it_done_sooner():
    slow = replace(DISK, read_bytes_per_s=1e9, write_bytes_per_s=1e12)
    tiers = stack(HOST, slow)
    tiers.stores[1].store(range(500), now=0.0)
    tiers.stores[0].store(range(60), now=0.0)
    plan = tiers.plan(range(500), 0, 500 * BLOCK, tokens=500 * BLOCK + 1, now=100.0)
    assert plan.runs == [(Tier.HOST, 60)]


def test_runs_of_one_tier_come_one_after_another_over_its_link():
    tiers = stack(replace(HOST, capacity_tokens=10**6), replace(DISK, read_bytes_per_s=100e9), layers=1)
    host, disk = tiers.stores
    for store, run in ((host, range(400)), (disk, range(400, 410)), (host, range(410, 810))):
        store.store(run, now=0.0)
    plan = tiers.plan(range(810), 0, 810 * BLOCK, tokens=810 * BLOCK + 1, now=100.0)
    assert plan.runs == [(Tier.HOST, 400), (Tier.DISK, 10), (Tier.HOST, 400)]
    assert plan.ready_at - 100.0 == pytest.approx(1e-3 + 800 * BLOCK_BYTES / (4 * 45e9))


def test_a_prompt_that_is_cached_as_a_whole_is_planned_with_its_last_block_to_compute():
    tiers = stack(replace(HOST, capacity_tokens=10**6), layers=80)
    tiers.computed(range(100), 0.0)
    plan = tiers.plan(range(100), 0, 100 * BLOCK - 16, tokens=100 * BLOCK, now=5.0)
    reload_s, compute_s = 1e-3 + 100 * BLOCK_BYTES / (4 * 45e9), PROFILE.ttft_s(16, 100 * BLOCK - 16)
    # the last block's prefill runs behind the reload but for its last layer's share
    assert plan.ready_at + compute_s - 5.0 == pytest.approx(reload_s + compute_s / 80)


def test_what_host_memory_cannot_hold_goes_to_disk_and_the_index_hears_of_it():
    tiers, index = stack(HOST, DISK), FleetIndex(1)
    for start in range(0, 200, 50):
        tiers.computed(range(start, start + 50), start / 10)
    assert len(tiers.stores[0]) == 64
    assert len(tiers.stores[1]) == 200 - 64
    for change in tiers.take_changes():
        (index.store if change.stored else index.remove)(change.worker, change.hashes, change.tier)
    for chunk in range(200):
        held = [tier for tier in Tier if index.residency([chunk], 1, [0], Speculations(0.0)).tiers()[0][tier]]
        assert held == [Tier.HOST if chunk in tiers.stores[0] else Tier.DISK]


def test_a_watermark_leaves_room():
    tiers = stack(replace(HOST, watermark=0.5), DISK)
    tiers.computed(range(64), 0.0)
    assert len(tiers.stores[0]) == 32


def test_what_has_been_idle_for_long_moves_down():
    tiers = stack(replace(HOST, idle_s=60.0), DISK)
    tiers.computed([1, 2], 0.0)
    tiers.computed([11, 12], 1.0)
    tiers.touch([1], 50.0)
    tiers.computed([21], 100.0)
    assert [block in tiers.stores[0] for block in (1, 2, 11, 12, 21)] == [True, False, False, False, True]
    assert all(block in tiers.stores[1] for block in (2, 11, 12))


def test_cxl_memory_is_host_memory_to_the_gateway():
    tiers = stack(HOST, replace(HOST, name="cxl", capacity_tokens=1000 * BLOCK))
    for start in range(0, 200, 50):
        tiers.computed(range(start, start + 50), float(start))
    index = FleetIndex(1)
    for change in tiers.take_changes():
        (index.store if change.stored else index.remove)(change.worker, change.hashes, change.tier)
    assert index.residency(range(200), BLOCK, [0], Speculations(0.0)).tiers() == [[0, 200 * BLOCK, 0, 0]]


def test_a_link_that_is_behind_takes_no_more_copies():
    store = TierStore(replace(DISK, write_bytes_per_s=BLOCK_BYTES), BLOCK, BLOCK_BYTES)  # a block per second
    assert store.store([1, 2], now=0.0)[0] == [1, 2]
    assert store.store([3], now=0.0)[0] == []
    assert store.refused_blocks == 1
    assert store.store([3], now=1.5)[0] == [3]


def test_transfers_of_one_link_wait_for_each_other():
    channel = Channel(100.0, latency_s=1.0)
    assert channel.transfer(200.0, now=0.0) == 3.0
    assert channel.transfer(100.0, now=0.0) == 4.0
    channel.fail(until=10.0)
    assert channel.transfer(100.0, now=5.0) == 12.0


def test_a_pool_serves_workers_that_have_never_seen_a_prompt():
    trace = Trace([SimRequest(60.0 * at, range(128), 8192, 1) for at in range(2)], BLOCK)
    result = simulate(trace, FleetSettings(workers=2, tiers=(POOL,)), "round-robin")
    assert result.worker.tolist() == [0, 1]
    assert result.hit_tokens[1].tolist() == [0, 0, 0, 8192 - 16]


def test_a_shared_tier_is_held_by_everyone_in_the_index():
    index = FleetIndex(3)
    index.store(EVERYONE, [7], Tier.REMOTE)
    assert index.residency([7], 1, [0, 1, 2], Speculations(0.0)).tiers() == [[0, 0, 0, 1]] * 3
    index.remove(EVERYONE, [7], Tier.REMOTE)
    assert index.residency([7], 1, [0, 1, 2], Speculations(0.0)).hits() == [0, 0, 0]


def test_waiting_requests_have_their_prefix_brought_closer():
    tiers = stack(replace(HOST, capacity_tokens=10**6), DISK)
    tiers.stores[1].store(range(50), now=0.0)
    tiers.prefetch(range(50), 10, now=5.0)
    assert all(block in tiers.stores[0] for block in range(10, 50))
    assert 9 not in tiers.stores[0]
    # what is still on its way passes through: not before it is there, and without being read again
    assert tiers.stores[0].reload_s(range(10, 50), 5.0) == pytest.approx(40 * BLOCK_BYTES / 7e9)


def test_what_makes_way_for_a_prefetched_prefix_moves_down():
    tiers = stack(HOST, DISK)
    tiers.computed(range(100, 164), now=0.0)
    tiers.stores[1].store(range(50), now=0.0)
    tiers.prefetch(range(50), 0, now=5.0)
    assert all(block in tiers.stores[0] for block in range(50))
    assert all(block in tiers.stores[0] or block in tiers.stores[1] for block in range(100, 164))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tier": Tier.HBM}, "HOST, DISK or REMOTE"),
        ({"read_bytes_per_s": 0.0}, "read_bytes_per_s"),
        ({"compression": 2.0}, "compression"),
        ({"watermark": 0.0}, "watermark"),
        ({"capacity_tokens": -1}, "capacity_tokens"),
        ({"latency_s": float("inf")}, "latency_s"),
    ],
)
def test_impossible_tiers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(DISK, **fields)


def test_tiers_are_listed_fastest_first():
    with pytest.raises(ValueError, match="fastest first"):
        FleetSettings(tiers=(DISK, HOST))


def test_tiers_have_names_of_their_own():
    with pytest.raises(ValueError, match="'nvme' names several"):
        FleetSettings(tiers=(DISK, replace(POOL, name="nvme")))
    with pytest.raises(ValueError, match="'transfer' names several"):
        FleetSettings(tiers=(replace(POOL, name="transfer"),), disaggregation=DisaggregationSettings(prefill_workers=1))
