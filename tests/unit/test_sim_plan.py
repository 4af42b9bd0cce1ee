"""The planner's figures: those that were published come out, and the fleets it names meet their targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from policies.cost import LLAMA_3_70B
from sim import plan
from sim.profiles import LINKS, PROFILES, Link, find_profile
from sim.requests import SimRequest, Trace
from sim.reuse import lru_hit_rates
from sim.shapes import find_shape, kv_capacity_tokens
from sim.trace import read_trace
from tests.processes import ROOT

H100 = find_profile("llama-3.1-70b/h100/4")
SHARED = ROOT.parent / "shared" / "traces"
TFLOPS = 1e12
GB = 1e9
GIB = 2**30


def kvway(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(*words: object) -> dict[str, Any]:
    result = kvway(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


@pytest.mark.parametrize(
    ("tokens", "batch", "gigabytes"),
    [(128_000, 1, 41.94), (32_768, 1, 10.74), (4_000, 1, 1.31), (4_096, 1, 1.34), (8_000, 1, 2.62)],
)
def test_footprints_of_a_70b_are_the_published_ones(tokens: int, batch: int, gigabytes: float) -> None:
    found = answer("plan", "footprint", "--tokens", tokens, "--batch", batch)
    assert found["kv_bytes_per_token"] == 327_680
    assert found["exact_bytes"] / GB == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize(("tokens", "batch", "published"), [(8_192, 1, 2.56), (32_768, 4, 40.96), (131_072, 8, 327.68)])
def test_batches_of_a_70b_take_what_was_published(tokens: int, batch: int, published: float) -> None:
    # Published as GiB, but reckoned as 0.32 per 1,024 tokens: 2.4 % more than the GiB they are.
    exact = plan.footprint(LLAMA_3_70B, tokens, batch, 16).exact_bytes
    assert exact / GIB * 1.024 == pytest.approx(published)


def test_paging_adds_at_most_a_block_less_a_token() -> None:
    found = plan.footprint(LLAMA_3_70B, 1_001, 3, 16)
    assert found.overhead == pytest.approx(7 / 1_001)
    assert found.overhead_bound == pytest.approx(15 / 1_001)


def test_quantised_cache_takes_a_half_and_a_quarter() -> None:
    full, fp8, int4 = (
        answer("plan", "footprint", "--precision", each)["exact_bytes"] for each in ("fp16", "fp8", "int4")
    )
    assert (full / fp8, full / int4) == (2, 4)


def test_break_even_of_a_70b_is_the_published_table() -> None:
    found = answer(
        "plan", "break-even", "--tflops", 400, "--tier", "dram=64", "--tier", "nvme=14", "--tier", "object=2"
    )
    assert found["recompute_s"] == pytest.approx(11.47, abs=0.005)
    assert found["size_bytes"] / GB == pytest.approx(10.74, abs=0.005)
    dram, nvme, stored = found["tiers"]
    assert dram["seconds"] == pytest.approx(0.168, abs=0.0005)
    assert nvme["seconds"] == pytest.approx(0.767, abs=0.0005)
    assert stored["seconds"] == pytest.approx(5.37, abs=0.005)
    assert [each["speedup"] for each in found["tiers"]] == pytest.approx([68, 15, 2.1], rel=0.02)
    assert all(each["pays"] for each in found["tiers"])
    assert found["bytes_per_s"] / GB == pytest.approx(0.936, abs=0.001)


def test_a_tier_at_the_break_even_bandwidth_takes_as_long_as_the_prefill() -> None:
    first = plan.break_even(LLAMA_3_70B, 32_768, {}, flops=400 * TFLOPS)
    again = plan.break_even(LLAMA_3_70B, 1_000, {"tier": Link(first.bytes_per_s, 0)}, flops=400 * TFLOPS)
    assert again.tiers[0].speedup == pytest.approx(1)


@pytest.mark.parametrize(("speed", "milliseconds"), [(50, 52), (900, 2.9)])
def test_a_prefill_worker_hands_over_2_6_gigabytes(speed: int, milliseconds: float) -> None:
    found = answer("plan", "break-even", "--tokens", 8_000, "--tier", f"link={speed}")
    assert found["tiers"][0]["seconds"] * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_25_gigabit_ethernet_is_slower_than_recomputing_on_four_h100() -> None:
    found = plan.break_even(LLAMA_3_70B, 8_192, LINKS, profile=H100)
    slower = {each.tier for each in found.tiers if not each.pays}
    assert slower == {"ethernet-25g", "s3", "sata", "nvme-gen3"}


def test_the_benefit_is_weighted_with_the_reuse() -> None:
    sure, half = (plan.break_even(LLAMA_3_70B, 8_192, LINKS, profile=H100, reuse=reuse) for reuse in (1.0, 0.5))
    assert [each.benefit_s for each in half.tiers] == pytest.approx([each.benefit_s / 2 for each in sure.tiers])


@pytest.mark.parametrize(("profile", "tokens"), [("qwen3-32b/h100/2", 307_328), ("llama-3.1-70b/h100/4", 461_376)])
def test_kv_capacity_is_what_such_workers_reported(profile: str, tokens: int) -> None:
    assert kv_capacity_tokens(profile) == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize("name", PROFILES)
def test_shapes_agree_with_the_profiles(name: str) -> None:
    assert find_shape(name.split("/")[0]).kv_bytes_per_token == PROFILES[name].kv_bytes_per_token
    assert kv_capacity_tokens(name) > 0


def test_an_idle_fleet_has_the_fitted_times() -> None:
    found = plan.evaluate(H100, plan.Traffic(1e-9, 4_096, 100), workers=1)
    assert found is not None
    assert found.ttft_s == pytest.approx(H100.ttft_s(4_096))
    assert found.itl_s == pytest.approx(H100.decode_d0_s)


def test_the_fleet_is_the_smallest_that_meets_the_targets() -> None:
    traffic = plan.Traffic(20, 8_000, 300, hit=0.4)
    fleet = plan.size_fleet(H100, traffic, 2.0, 0.05, 461_376)
    assert fleet.ttft_quantile_s <= 2.0
    assert fleet.itl_s <= 0.05
    smaller = plan.evaluate(H100, traffic, fleet.workers - 1)
    assert smaller is None or smaller.ttft_quantile_s > 2.0 or smaller.itl_s > 0.05 or smaller.kv_tokens > 461_376
    assert fleet.gpus == 4 * fleet.workers


def test_more_hits_need_fewer_workers() -> None:
    counts = [
        answer("plan", "fleet", "--rate", 20, "--prompt", 16_000, "--hit", hit)["workers"] for hit in (0, 0.5, 0.9)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fleet", "--prompt", 500_000], "KV cache holds"),
        (["fleet", "--prompt", 64_000, "--ttft", 1], "one request alone"),
        (["fleet", "--itl", 0.01], "one request alone decodes"),
        (["fleet", "--profile", "llama-3.1-70b/h100/5"], "Did you mean"),
        (["footprint", "--model", "llama-3.1-71b"], "Did you mean 'llama-3.1-70b'"),
        (["footprint", "--precision", "fp17"], "unknown precision"),
        (["break-even", "--tier", "nvme"], "name=GB/s"),
        (["break-even", "--tier", "nvme=0"], "name=GB/s"),
        (["break-even", "--profile", "x"], "unknown profile"),
        (["tiers", "rag", "--link", "floppy"], "unknown tier"),
        (["tiers", "rag", "--sizes", "1,-2"], "numbers from 0"),
        (["tiers", "agent"], "Did you mean 'agents'"),
        (["break-even", "--tier", "nvme=1e300"], "name=GB/s"),
        (["tiers", "rag", "--sizes", "1e300"], "numbers from 0"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_message(words: list[object], said: str) -> None:
    result = kvway("plan", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["footprint", "--tokens", "9" * 400],
        ["break-even", "--tflops", "inf"],
        ["disaggregation", "--itl", "inf"],
        ["fleet", "--variation", "1e308"],
        ["tiers", "rag", "--gpu-hour", "inf"],
        ["tiers", "rag", "--workers", "9" * 400],
    ],
)
def test_numbers_that_leave_the_range_of_formulas_are_refused(words: list[str]) -> None:
    result = kvway("plan", *words)
    assert result.exit_code == 2
    assert words[-2] in result.output


def test_where_prefill_disturbs_nobody_a_hand_over_never_pays() -> None:
    found = answer("plan", "disaggregation", "--interference", 0)
    assert {each["break_even_streams"] for each in found["handovers"]} == {None}
    assert "never" in kvway("plan", "disaggregation", "--interference", 0).output


@pytest.mark.parametrize("words", ["footprint", "break-even", "disaggregation", "fleet", "tiers agents"])
def test_tables_fit_eighty_columns(words: str) -> None:
    result = kvway("plan", *words.split())
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_cheapest_tier_is_neither_none_nor_all() -> None:
    curve = [(0, 0.2), (1_000_000, 0.5), (4_000_000, 0.7), (64_000_000, 0.71)]
    options = plan.size_tier(H100, LINKS["host"], plan.Prices(2.5, 3.0), 10, 8_000, 0.2, curve)
    cheapest = min(options, key=lambda option: option.cost)
    assert cheapest.size_tokens == 4_000_000
    assert options[0].tier_cost == 0
    assert options[-1].gpu_cost < options[0].gpu_cost


def test_a_tier_is_sized_by_what_it_saves() -> None:
    words = ("plan", "tiers", "agents:sessions=300,turns=4", "--workers", 1, "--sizes", "0,2,4")
    dear, cheap = (answer(*words, "--gb-month", price) for price in (1e6, 1e-6))
    assert dear["best"] == 0
    assert cheap["best"] > 0
    hits = [option["hit"] for option in cheap["options"]]
    assert hits == sorted(hits)
    assert hits[0] < hits[1]


def test_for_traffic_without_a_rate_no_tier_is_sized(tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 7, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}')
    result = kvway("plan", "tiers", trace)
    assert result.exit_code == 2
    assert "all come at once" in result.output


def test_an_lru_cache_serves_what_it_still_holds() -> None:
    def request(at: float, *chunks: int) -> SimRequest:
        return SimRequest(at, chunks, 10 * len(chunks), 1)

    trace = Trace([request(0, 1, 2), request(1, 3), request(2, 1, 2), request(3, 1, 4)], block_tokens=10)
    # Two blocks: the second request pushes out block 2, the end of the first, so that the third finds block 1 alone.
    assert lru_hit_rates(trace, [float("inf"), 30, 20, 0]) == pytest.approx([3 / 7, 3 / 7, 2 / 7, 0])


@pytest.mark.skipif(not SHARED.exists(), reason=f"the published traces are not in {SHARED}")
def test_the_published_trace_has_the_published_bounds() -> None:
    trace = read_trace(SHARED / "mooncake_conversation.jsonl.gz")
    rates = lru_hit_rates(trace, [2**22, 2**25, float("inf")])
    assert rates == sorted(rates)
    assert round(rates[-1], 3) == 0.374
