"""One worker per data-parallel rank behind a shared port."""

from __future__ import annotations

from gateway.config import WorkerConfig
from gateway.events.sources import parse_sglang_sources
from gateway.fleet.metrics import parse_metrics
from gateway.fleet.registry import Worker
from gateway.relay.head import read_request_head
from gateway.relay.pool import WorkerPool

VLLM = b"""\
process_start_time_seconds 7.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1.0
"""


def test_a_rank_has_its_own_load_and_cache() -> None:
    both, second = parse_metrics(VLLM), parse_metrics(VLLM, rank=1)
    assert (both.running, both.kv_usage, both.kv_capacity_tokens) == (8, 0.5, 4800)
    assert (second.running, second.kv_usage, second.kv_capacity_tokens) == (5, 0.75, 3200)
    assert both.start_time_s == second.start_time_s == 7


def test_sglang_calls_the_label_otherwise_and_samples_without_it_count_for_every_rank() -> None:
    text = b'sglang:num_running_reqs{model_name="m",dp_rank="0"} 1\nsglang:num_running_reqs{dp_rank="1"} 2\n'
    assert parse_metrics(text, rank=0).running == 1
    assert parse_metrics(b'sglang:num_running_reqs{tp_rank="0"} 4\n', rank=1).running == 4


async def test_requests_to_a_rank_name_it_before_anything_the_client_says() -> None:
    def head_for(rank: int | None) -> bytes:
        config = WorkerConfig(url="http://10.0.0.1:8000", data_parallel_rank=rank)
        pool = WorkerPool(Worker.from_config(config), 1.0, None)
        headers = [(b"host", b"kvway"), (b"x-data-parallel-rank", b"7")]
        head = read_request_head(b"POST", b"/v1/completions", "1.1", headers, True)
        return head.for_worker(pool.host, 0, pool.fields)

    assert b"host: 10.0.0.1:8000\r\nx-data-parallel-rank: 1\r\nx-data-parallel-rank: 7\r\n" in head_for(1)
    assert b"host: 10.0.0.1:8000\r\nx-data-parallel-rank: 7\r\n" in head_for(None)


def test_sglang_on_an_address_of_six_has_brackets_in_its_endpoints() -> None:
    info = b'{"kv_events": {"endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}}'
    assert [source.endpoint for source in parse_sglang_sources(info, "fd00::7")] == [
        "tcp://[fd00::7]:5557",
        "tcp://[fd00::7]:5558",
    ]
