"""Where engines say that they publish."""

from __future__ import annotations

import msgspec
import pytest

from gateway.events.sources import EventSource, parse_sglang_sources, parse_vllm_sources

VLLM = {
    "1": {"endpoint": "tcp://*:5558", "replay_endpoint": None, "topic": "kv@pod@model"},
    "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5560", "topic": "", "buffer_steps": 10_000},
}


def test_ranks_of_vllm_come_in_order_with_the_workers_host_in_place_of_the_star() -> None:
    assert parse_vllm_sources(msgspec.json.encode(VLLM), "10.0.0.7") == [
        EventSource(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5560", "", binds=True),
        EventSource(1, "tcp://10.0.0.7:5558", None, "kv@pod@model", binds=True),
    ]


def test_an_ipv6_host_gets_its_brackets() -> None:
    (source,) = parse_vllm_sources(b'{"0": {"endpoint": "tcp://[::]:5557"}}', "fd00::7")
    assert source == EventSource(0, "tcp://[fd00::7]:5557", None, "", binds=True)


def test_vllm_connects_to_an_endpoint_without_a_star() -> None:
    (source,) = parse_vllm_sources(b'{"0": {"endpoint": "tcp://10.0.0.1:5557"}}', "10.0.0.7")
    assert source == EventSource(0, "tcp://10.0.0.1:5557", None, "", binds=False)


@pytest.mark.parametrize("parse", [parse_vllm_sources, parse_sglang_sources])
def test_an_engine_may_publish_nothing(parse) -> None:
    assert parse(b"{}", "h") == []


def test_ranks_of_sglang_count_up_from_the_base_ports() -> None:
    info = {
        "model_path": "m",
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "replay_endpoint_port_base": 5600,
            "topic": "t",
            "block_size": 16,
            "dp_size": 2,
        },
    }
    assert parse_sglang_sources(msgspec.json.encode(info), "w") == [
        EventSource(0, "tcp://w:5557", "tcp://w:5600", "t", binds=True),
        EventSource(1, "tcp://w:5558", "tcp://w:5601", "t", binds=True),
    ]


def test_sglang_may_listen_on_one_address_and_have_no_replay() -> None:
    info = b'{"kv_events": {"endpoint_host": "10.1.1.1", "endpoint_port_base": 7}}'
    assert parse_sglang_sources(info, "w") == [EventSource(0, "tcp://10.1.1.1:7", None, "", binds=True)]


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b'{"0": 3}', b'{"0": {}}', b'{"x": {"endpoint": "tcp://*:1"}}'])
def test_something_else_of_vllm_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_vllm_sources(body, "h")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"kv_events": 3}',
        b'{"kv_events": {}}',
        b'{"kv_events": {"endpoint_port_base": 7, "dp_size": [2]}}',
        b'{"kv_events": {"endpoint_port_base": 7, "dp_size": 1000000000}}',
    ],
)
def test_something_else_of_sglang_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_sglang_sources(body, "h")
