"""What the planner says of prefill and decode apart: the published figures come out, and its parts agree."""

from __future__ import annotations

import pytest

from sim.plan import Impossible
from sim.plan_disaggregation import Demand, Disaggregation, disaggregation
from sim.profiles import LINKS, NETWORK_LINKS, Link, find_profile
from sim.shapes import kv_capacity_tokens
from tests.unit.test_sim_plan import answer, kvway

NAME = "llama-3.1-70b/h100/4"
H100 = find_profile(NAME)
KV_BYTES = 327_680
CAPACITY = kv_capacity_tokens(NAME)
GB = 1e9
NETWORK = {name: LINKS[name] for name in NETWORK_LINKS}


def planned(
    prompt: int = 8_000, uncached: int = 8_000, itl_s: float = 0.03, links: dict[str, Link] = NETWORK, streams: int = 0
) -> Disaggregation:
    return disaggregation(H100, KV_BYTES, CAPACITY, Demand(prompt, uncached, 300, itl_s, 2.0), links, streams=streams)


@pytest.mark.parametrize(("prompt", "gigabytes"), [(4_096, 1.34), (4_000, 1.31), (8_000, 2.62)])
def test_what_is_moved_is_what_was_published(prompt: int, gigabytes: float) -> None:
    found = answer("plan", "disaggregation", "--prompt", prompt)
    assert found["transfer_bytes"] / GB == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize(("gb_s", "milliseconds"), [(50, 52), (900, 2.9)])
def test_2_6_gigabytes_take_52_ms_over_rdma_and_2_9_over_nvlink(gb_s: int, milliseconds: float) -> None:
    found = answer("plan", "disaggregation", "--prompt", 8_000, "--link", f"it={gb_s}", "--ttft", 0.2)
    (handover,) = found["handovers"]
    assert handover["transfer_s"] * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_that_is_26_percent_of_a_ttft_of_200_ms() -> None:
    found = answer("plan", "disaggregation", "--prompt", 8_000, "--link", "rdma=50", "--ttft", 0.2)
    assert found["handovers"][0]["ttft_share"] == pytest.approx(0.26, abs=0.003)


def test_a_25_gbit_link_moves_a_prompt_in_longer_than_it_takes_to_compute() -> None:
    # published for other GPUs; per token 131 µs against 70 µs of prefill at 8k
    ethernet = planned().handovers[-1]
    assert ethernet.link == "ethernet-25g"
    assert ethernet.transfer_s > 2 * H100.ttft_s(8_000)


def test_only_uncached_tokens_are_moved_and_computed() -> None:
    found = planned(prompt=32_000, uncached=1_500)
    assert found.transfer_bytes == 1_500 * KV_BYTES
    assert found.prefill_s == H100.ttft_s(1_500, 30_500)


def test_the_batch_is_the_largest_within_the_itl() -> None:
    found = planned(itl_s=0.02)
    context = 8_000 + 150
    assert found.itl_apart_s == pytest.approx(H100.itl_s(found.batch, found.batch * context))
    assert found.itl_apart_s <= 0.02 < H100.itl_s(found.batch + 1, (found.batch + 1) * context)
    assert planned(itl_s=1.0).batch == CAPACITY // 8_300


def test_prefills_on_the_same_worker_lengthen_its_steps() -> None:
    found = planned()
    assert found.itl_whole_s > found.itl_apart_s
    assert found.pause_whole_s > found.prefill_s
    assert found.ttft_whole_s > found.prefill_s
    assert found.itl_whole_s - found.itl_apart_s == pytest.approx(
        found.batch / 300 * (found.prefill_s - H100.prefill_a_s)
    )


def test_pools_in_the_ratio_given_bear_the_same_rate() -> None:
    found = planned()
    decodes, prefills = 10, 10 * found.prefill_per_decode
    assert prefills * found.prefill_rate == pytest.approx(decodes * found.decode_rate)
    assert found.apart_rate * (prefills + decodes) == pytest.approx(decodes * found.decode_rate)


def test_a_worker_that_does_both_meets_the_itl_at_its_rate() -> None:
    found = planned(itl_s=0.03)
    decode_s = H100.itl_s(1, 8_150) - H100.decode_d0_s
    utilisation = found.whole_rate * (found.prefill_s - H100.prefill_a_s + 300 * decode_s)
    assert H100.decode_d0_s / (1 - utilisation) == pytest.approx(0.03)


def test_a_hand_over_pays_beside_its_break_even_of_streams_and_not_beside_fewer() -> None:
    streams = planned().handovers[1].break_even_streams
    assert 1 < streams < 2
    assert not planned(streams=1).handovers[1].pays
    assert planned(streams=2).handovers[1].pays


def test_from_its_break_even_of_tokens_on_a_hand_over_pays() -> None:
    for each in planned(prompt=32_000, streams=4).handovers:
        least = each.break_even_tokens
        if least is None:
            continue
        (before,) = planned(32_000, least - 1, links={each.link: LINKS[each.link]}, streams=4).handovers
        (at,) = planned(32_000, least, links={each.link: LINKS[each.link]}, streams=4).handovers
        assert at.pays and not before.pays, each.link
    assert planned(streams=4).handovers[-1].break_even_tokens is None


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (Demand(8_000, 8_000, 300, 0.01, 2.0), "above the target of 10 ms"),
        (Demand(600_000, 600_000, 300, 0.1, 2.0), "KV cache holds"),
    ],
)
def test_what_cannot_be_is_refused(demand: Demand, message: str) -> None:
    with pytest.raises(Impossible, match=message):
        disaggregation(H100, KV_BYTES, CAPACITY, demand, NETWORK)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link", "rdma"], "--link 'rdma' is not name=GB/s"),
        (["--profile", "llama-3.1-70b/h100/5"], "unknown profile"),
        (["--profile", "x"], "unknown model"),
        (["--uncached", "9000"], "more than the 8000 tokens"),
        (["--itl", "0.01"], "above the target"),
    ],
)
def test_mistakes_are_said_in_one_line(words: list[str], message: str) -> None:
    result = kvway("plan", "disaggregation", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_table_names_every_link_and_says_never() -> None:
    shown = kvway("plan", "disaggregation", "--itl", 0.02).stdout
    assert "…" not in shown, "a name was cut"
    for name in ("nvlink", "roce-100g", "never", "prefill workers per decode worker"):
        assert name in shown
