"""From a pod or a Service to workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from gateway.config_workers import DnsConfig, FoundConfig, KubernetesConfig
from gateway.fleet.discovery.found import Found
from gateway.fleet.discovery.kube_objects import Pod, Service, Unusable, engines_of
from tests import kube

CONFIG = KubernetesConfig(selector="app=vllm")


def found(thing: dict[str, Any], zone: str = "", config: KubernetesConfig = CONFIG, **worker: Any) -> list[Found]:
    kind: type[Pod] | type[Service] = Pod if thing["kind"] == "Pod" else Service
    changes = {"worker": FoundConfig(**worker)} if worker else {}
    return engines_of(msgspec.convert(thing, kind), config.model_copy(update=changes), zone)


def annotated(**annotations: str) -> dict[str, Any]:
    named = {f"kvway.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return kube.pod("vllm-0", "10.1.2.3", annotations=named)


def test_a_pod_is_a_worker_of_its_name_that_is_asked_for_its_events() -> None:
    (engine,) = found(kube.pod("vllm-0", "10.1.2.3"))
    assert (engine.config.label, engine.config.url, engine.life) == ("vllm-0", "http://10.1.2.3:8000", "uid-vllm-0")
    assert engine.accepts and engine.asks and engine.config.kv_events is None


def test_an_address_of_six_is_put_in_brackets() -> None:
    (engine,) = found(kube.pod("vllm-0", "fd00::7"), kv_events_port=5557)
    assert engine.config.url == "http://[fd00::7]:8000"
    assert engine.config.kv_events is not None and engine.config.kv_events.endpoint == "tcp://[fd00::7]:5557"


def test_with_several_namespaces_names_have_theirs() -> None:
    config = CONFIG.model_copy(update={"namespaces": ("ai", "batch")})
    assert found(kube.pod("vllm-0"), config=config)[0].config.label == "vllm-0.ai"


def test_annotations_win_over_the_settings_of_the_source() -> None:
    thing = annotated(port="9000", models="llama, sql", kv_events_port="6000", kv_replay_port="6001", kv_topic="kv")
    (engine,) = found(thing, port=8000, models=("other",), kv_events_port=5557)
    events = engine.config.kv_events
    assert (engine.config.url, engine.config.models) == ("http://10.1.2.3:9000", ("llama", "sql"))
    assert events is not None and not engine.asks
    assert (events.endpoint, events.replay_endpoint, events.topic) == (
        "tcp://10.1.2.3:6000",
        "tcp://10.1.2.3:6001",
        "kv",
    )


def test_settings_of_the_source_reach_every_worker() -> None:
    (engine,) = found(kube.pod("a"), scheme="https", pool="store", kv_capacity_tokens=7)
    assert (engine.config.url, engine.config.pool, engine.config.kv_capacity_tokens) == (
        "https://127.0.0.1:8000",
        "store",
        7,
    )


def test_several_ports_are_several_engines_whose_events_are_one_port_apart() -> None:
    first, second = found(annotated(port="8000,8001"), kv_events_port=5557)
    assert [first.config.label, second.config.label] == ["vllm-0-8000", "vllm-0-8001"]
    assert first.config.kv_events is not None and second.config.kv_events is not None
    assert [first.config.kv_events.endpoint[-4:], second.config.kv_events.endpoint[-4:]] == ["5557", "5558"]
    assert first.config.data_parallel_rank is second.config.data_parallel_rank is None


def test_ranks_behind_one_port_are_workers_with_a_rank_and_events_of_their_own() -> None:
    engines = [
        each.config for each in found(annotated(data_parallel_size="2"), kv_events_port=5557, kv_replay_port=6557)
    ]
    assert [(each.label, each.url, each.data_parallel_rank) for each in engines] == [
        ("vllm-0-dp0", "http://10.1.2.3:8000", 0),
        ("vllm-0-dp1", "http://10.1.2.3:8000", 1),
    ]
    events = [each.kv_events for each in engines if each.kv_events is not None]
    assert [each.endpoint for each in events] == ["tcp://10.1.2.3:5557", "tcp://10.1.2.3:5558"]
    assert [each.replay_endpoint for each in events] == ["tcp://10.1.2.3:6557", "tcp://10.1.2.3:6558"]


@pytest.mark.parametrize(("label", "role"), [("prefill", "prefill"), ("decode", "decode"), ("both", "mixed")])
def test_the_role_is_a_label(label: str, role: str) -> None:
    assert found(kube.pod("a", labels={"kvway.io/role": label}))[0].config.role == role
    config = CONFIG.model_copy(update={"role_label": "llm-d.ai/role"})
    assert found(kube.pod("a", labels={"llm-d.ai/role": label}), config=config)[0].config.role == role


def test_the_zone_is_the_domain_where_nothing_else_is_said() -> None:
    assert found(kube.pod("a"), "zone-a")[0].config.domain == "zone-a"
    assert found(kube.pod("a"), "zone-a", domain="rack-1")[0].config.domain == "rack-1"
    assert found(annotated(domain="rack-2"), "zone-a")[0].config.domain == "rack-2"


def test_a_pod_without_an_address_or_that_has_ended_is_no_worker() -> None:
    assert found(kube.pod("a", ip="")) == []
    ended = kube.pod("a")
    ended["status"]["phase"] = "Succeeded"
    assert found(ended) == []
    assert found(annotated(ignore="true")) == []


def test_a_pod_that_is_not_ready_or_terminating_gets_no_new_requests() -> None:
    assert not found(kube.pod("a", ready=False))[0].accepts
    assert not found(kube.pod("a", deletionTimestamp="2026-01-01T00:00:00Z"))[0].accepts
    unknown = kube.pod("a")
    del unknown["status"]["conditions"]
    assert not found(unknown)[0].accepts


@pytest.mark.parametrize(
    ("annotation", "value", "complaint"),
    [
        ("port", "http", r"vllm-0: annotation kvway.io/port is 'http'; write a port"),
        ("port", "70000", r"kvway.io/port is '70000'"),
        (
            "kv_events_port",
            "0",
            r"pod vllm-0 in ai: annotation kvway.io/kv-events-port is .0.: .*greater than",
        ),
        ("scheme", "ftp", r"annotation kvway.io/scheme is 'ftp'"),
        ("data_parallel_size", "two", r"annotation kvway.io/data-parallel-size is 'two'"),
    ],
)
def test_an_annotation_that_makes_no_sense_is_named(annotation: str, value: str, complaint: str) -> None:
    with pytest.raises(Unusable, match=complaint):
        found(annotated(**{annotation: value}))


def test_an_engine_or_rank_whose_port_would_be_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(Unusable, match=r"pod vllm-0 in ai: .*65536.* is not a ZMQ endpoint"):
        found(annotated(port="8000,8001", kv_events_port="65535"))
    with pytest.raises(Unusable, match=r"kvway.io/data-parallel-size is '2'.* ports from kv_events_port on"):
        found(annotated(kv_events_port="65535", data_parallel_size="2"))
    with pytest.raises(ValidationError, match=r"data_parallel_size\n.* ports from kv_replay_port on"):
        DnsConfig.model_validate({"name": "a", "worker": {"kv_replay_port": 65535, "data_parallel_size": 2}})


def test_a_role_that_is_none_is_named() -> None:
    with pytest.raises(Unusable, match=r"label kvway.io/role is 'judge'"):
        found(kube.pod("a", labels={"kvway.io/role": "judge"}))


def test_a_service_is_a_worker_at_its_own_address_and_port() -> None:
    ports = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 80}]
    (engine,) = found(kube.service("llama", "10.96.0.7", *ports))
    assert (engine.config.label, engine.config.url) == ("llama", "http://10.96.0.7:80")
    assert found(kube.service("llama", "10.96.0.7", ports[0]))[0].config.url == "http://10.96.0.7:9090"
    annotations = {"kvway.io/port": "8080"}
    assert found(kube.service("llama", "10.96.0.7", *ports, annotations=annotations))[0].config.url[-4:] == "8080"
    assert found(kube.service("llama", "10.96.0.7"), port=8123)[0].config.url[-4:] == "8123"


def test_a_headless_service_is_refused_with_advice() -> None:
    with pytest.raises(Unusable, match=r"headless; use kind: pods, or discovery\.dns"):
        found(kube.service("llama", "None"))
