"""Times must come out as the published measurements that the profiles were fitted to."""

from __future__ import annotations

import pytest

from sim.profiles import LINKS, PROFILES, find_profile

# profile, TTFT in ms of one prompt of 1k, 4k, 8k, 32k and 128k tokens
MEASURED_TTFT = {
    "llama-3.1-8b/a100/1": (64.7, 259, 557, 3430, 32946),
    "llama-3.1-70b/h100/4": (67.4, 264, 577, 2531, 16697),
    "llama-3.1-70b/h100/8": (46.2, 170, 344, 1536, 9309),
    "qwen3-30b-a3b/h200/1": (28.3, 69.1, 138, 1016, 12062),
}
# profile, ITL in ms at batch 1, 32, 64 and 128 with contexts of 1k (batch 1) and 4k tokens
MEASURED_ITL = {
    "llama-3.1-8b/h100/1": (6.2, 12.4, 17.9, 28.8),
    "llama-3.1-70b/h100/4": (14.9, 20.2, 24.1, 32.9),
    "qwen3-32b/h200/2": (10.7, 15.4, 19.8, 28.5),
}


@pytest.mark.parametrize("name", MEASURED_TTFT)
def test_ttft_is_what_was_measured(name):
    profile = find_profile(name)
    for tokens, ms in zip((1024, 4096, 8192, 32768, 131072), MEASURED_TTFT[name], strict=True):
        assert profile.ttft_s(tokens) * 1e3 == pytest.approx(ms, rel=0.10)


@pytest.mark.parametrize("name", MEASURED_ITL)
def test_itl_is_what_was_measured(name):
    profile = find_profile(name)
    for (batch, context), ms in zip(((1, 1024), (32, 4096), (64, 4096), (128, 4096)), MEASURED_ITL[name], strict=True):
        assert profile.itl_s(batch, batch * context) * 1e3 == pytest.approx(ms, rel=0.10)


def test_a_cached_prefix_is_not_free():
    profile = find_profile("llama-3.1-8b/h100/1")
    assert profile.ttft_s(8192, cached=122_880) == pytest.approx(1.007, rel=0.10)
    assert profile.ttft_s(1024, cached=31_744) == pytest.approx(0.047, rel=0.10)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_mixed_step_costs_more_than_either_part_and_less_than_both(profile):
    prefill, decode = profile.ttft_s(4096), profile.itl_s(32, 32 * 4096)
    mixed = profile.step_s([(4096, 0)], 32, 32 * 4096)
    assert max(prefill, decode) < mixed < prefill + decode


def test_every_chunk_of_a_step_counts():
    profile = find_profile("qwen3-32b/h100/2")
    two = profile.step_s([(1000, 0), (500, 2000)], 0, 0)
    assert two == pytest.approx(profile.ttft_s(1000) + profile.ttft_s(500, 2000) - profile.prefill_a_s)


def test_bringing_back_a_gigabyte_takes_what_was_measured():
    assert LINKS["host"].seconds(1e9) == pytest.approx(0.0232, rel=0.01)
    assert LINKS["s3"].seconds(0) == pytest.approx(0.030)


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'qwen3-32b/h200/2'"):
        find_profile("qwen3-32b/h200/tp2")
