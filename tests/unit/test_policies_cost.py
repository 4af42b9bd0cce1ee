import numpy as np
import pytest

from policies.cost import (
    LLAMA_3_70B,
    ModelShape,
    break_even_bytes_per_s,
    expected_benefit_s,
    kv_bytes,
    paged_kv_bytes,
    prefill_seconds,
    recompute_seconds,
    reload_seconds,
    transfer_seconds,
)

GB = 1e9
TFLOPS = 1e12


def test_a_token_of_llama_70b_takes_327680_bytes():
    assert LLAMA_3_70B.kv_bytes_per_token == 327_680


@pytest.mark.parametrize(("tokens", "gigabytes"), [(32_768, 10.74), (128_000, 41.94), (4_096, 1.34), (4_000, 1.31)])
def test_kv_footprint_of_llama_70b(tokens, gigabytes):
    assert kv_bytes(LLAMA_3_70B, tokens) / GB == pytest.approx(gigabytes, abs=0.005)


def test_footprint_grows_with_the_batch_and_halves_in_fp8():
    fp8 = ModelShape(70e9, 80, 64, 8, 128, element_bytes=1)
    assert kv_bytes(LLAMA_3_70B, 100, batch=3) == 3 * kv_bytes(LLAMA_3_70B, 100)
    assert kv_bytes(fp8, 100) == kv_bytes(LLAMA_3_70B, 100) / 2


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (1000, 63)])
def test_paging_rounds_a_sequence_up_to_whole_blocks(tokens, blocks):
    assert paged_kv_bytes(LLAMA_3_70B, tokens, 16) == kv_bytes(LLAMA_3_70B, blocks * 16)


def test_paging_overhead_stays_below_a_block_per_sequence():
    for tokens in range(1, 200):
        overhead = paged_kv_bytes(LLAMA_3_70B, tokens, 16, batch=4) / kv_bytes(LLAMA_3_70B, tokens, batch=4) - 1
        assert overhead <= 15 / tokens + 1e-12


def test_recomputing_32k_tokens_of_a_70b_takes_11_47_seconds():
    assert recompute_seconds(LLAMA_3_70B, 32_768, 400 * TFLOPS, attention=False) == pytest.approx(11.47, abs=0.005)


def test_attention_adds_the_quadratic_term():
    linear = recompute_seconds(LLAMA_3_70B, 32_768, 400 * TFLOPS, attention=False)
    both = recompute_seconds(LLAMA_3_70B, 32_768, 400 * TFLOPS)
    assert both - linear == pytest.approx(4 * 80 * 64 * 128 * 32_768**2 / (400 * TFLOPS))


@pytest.mark.parametrize(("bandwidth", "seconds", "speedup"), [(64, 0.168, 68), (14, 0.767, 15), (2, 5.37, 2.1)])
def test_reloading_32k_tokens_of_a_70b(bandwidth, seconds, speedup):
    transfer = transfer_seconds(kv_bytes(LLAMA_3_70B, 32_768), bandwidth * GB)
    recompute = recompute_seconds(LLAMA_3_70B, 32_768, 400 * TFLOPS, attention=False)
    assert transfer == pytest.approx(seconds, rel=0.005)
    assert recompute / transfer == pytest.approx(speedup, rel=0.02)


def test_handing_2_6_gb_from_prefill_to_decode():
    assert transfer_seconds(2.6 * GB, 50 * GB) == pytest.approx(0.052)
    assert transfer_seconds(2.6 * GB, 900 * GB) == pytest.approx(0.0029, abs=5e-5)


def test_latency_comes_on_top_of_the_transfer():
    assert transfer_seconds(1 * GB, 1 * GB, latency_s=0.03) == pytest.approx(1.03)


def test_at_the_break_even_bandwidth_reloading_takes_as_long_as_recomputing():
    bandwidth = break_even_bytes_per_s(LLAMA_3_70B, 400 * TFLOPS)
    assert bandwidth == pytest.approx(0.936 * GB, rel=0.001)
    for tokens in (1_000, 32_768):
        reload = transfer_seconds(kv_bytes(LLAMA_3_70B, tokens), bandwidth)
        assert reload == pytest.approx(recompute_seconds(LLAMA_3_70B, tokens, 400 * TFLOPS, attention=False))


def test_expected_benefit_weighs_the_gain_with_the_probability_of_reuse():
    assert expected_benefit_s(0.5, 11.47, 0.168) == pytest.approx(5.651)
    assert expected_benefit_s(0.5, 1.0, 2.0) < 0


@pytest.mark.parametrize(("tokens", "milliseconds"), [(1_000, 67.4), (4_000, 264), (8_000, 577), (32_000, 2531)])
def test_prefill_time_follows_kernel_estimates_of_a_70b_on_four_h100(tokens, milliseconds):
    fitted = prefill_seconds(tokens, 0, 10.87e-3, 57.92e-6, 1.052e-9)
    assert fitted * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_a_cached_prefix_is_not_free():
    rates = (4.28e-3, 18.29e-6, 0.834e-9)
    assert prefill_seconds(4_096, 4_096, *rates) > prefill_seconds(4_096, 0, *rates)
    assert prefill_seconds(4_096, 4_096, *rates) < prefill_seconds(8_192, 0, *rates)


def test_prefill_time_of_many_workers_at_once_equals_one_by_one():
    new, cached, a, b, c = (
        np.array(column) for column in ([1.0, 512, 9000], [0.0, 256, 64], [0.01] * 3, [1e-5] * 3, [1e-9] * 3)
    )
    together = prefill_seconds(new, cached, a, b, c)
    assert together.tolist() == [prefill_seconds(*map(float, row)) for row in zip(new, cached, a, b, c, strict=True)]


def test_reload_time_adds_up_over_the_lower_tiers():
    host, disk, remote = np.array([[1000.0, 0], [0.0, 100], [10.0, 0]])
    assert reload_seconds(host, disk, remote, 2e-6, 5e-5, 1e-4) == pytest.approx([0.003, 0.005])
