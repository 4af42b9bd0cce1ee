from pathlib import Path

import pytest

from gateway.fleet.metrics import EngineMetrics, parse_metrics

GOLDEN = Path(__file__).parents[1] / "data" / "metrics" / "vllm-0.32.txt"


def test_a_real_vllm_is_read():
    assert parse_metrics(GOLDEN.read_bytes()) == EngineMetrics(
        running=0.0,
        waiting=0.0,
        kv_usage=0.0,
        kv_capacity_tokens=16384 * 32,
        block_size=32,
        start_time_s=1.79596094918e09,
        prompt_tokens=1462.0,
    )


def test_engines_behind_one_endpoint_are_summed_and_their_usage_averaged():
    text = b"""
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 50.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.6
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+06
vllm:prompt_tokens_total{engine="1",model_name="m"} 5.0
"""
    assert parse_metrics(text) == EngineMetrics(
        running=7, waiting=3, kv_usage=pytest.approx(0.4), kv_capacity_tokens=4800, block_size=16, prompt_tokens=1e6 + 5
    )


def test_sglang_is_read():
    text = b"""sglang:num_running_reqs{model_name="m",engine_type="unified"} 5.0
sglang:num_queue_reqs{model_name="m",engine_type="unified"} 7.0
sglang:token_usage{model_name="m",engine_type="unified"} 0.25
sglang:max_total_num_tokens{model_name="m",engine_type="unified"} 471258.0
sglang:page_size{model_name="m",engine_type="unified"} 64.0
sglang:prompt_tokens_total{model_name="m"} 99.0
"""
    assert parse_metrics(text) == EngineMetrics(5, 7, 0.25, 471258, 64, None, 99)


def test_an_older_sglang_tells_its_cache_in_labels():
    metrics = parse_metrics(b'sglang:cache_config_info{model_name="m",num_pages="10",page_size="64"} 1.0\n')
    assert (metrics.block_size, metrics.kv_capacity_tokens) == (64, 640)


def test_an_engine_that_has_not_profiled_its_memory_has_no_capacity_yet():
    metrics = parse_metrics(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0')
    assert (metrics.block_size, metrics.kv_capacity_tokens) == (16, None)


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_running{model_name="a } 9 b"} 4.0',
        b'vllm:num_requests_running{model_name="a\\"b,}"} 4.0 1700000000000',
        b"vllm:num_requests_running 4",
        b"vllm:num_requests_running   4e0",
        b"\r\nvllm:num_requests_running 4\r\n",
    ],
)
def test_labels_and_numbers_may_look_like_anything(line):
    assert parse_metrics(line).running == 4


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>not found</html>",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{",
        b"vllm:num_requests_running{} NaN",
        b"vllm:num_requests_running{} +Inf",
        b"vllm:num_requests_running{} many",
        b"vllm:num_requests_running_total 4",
        b"# vllm:num_requests_running 4",
        b"my_vllm:num_requests_running 4",
        b"\xff\xfe\x00vllm:num_requests_running",
    ],
)
def test_what_is_no_sample_says_nothing(text):
    assert parse_metrics(text) == EngineMetrics()
