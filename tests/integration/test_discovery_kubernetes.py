"""Workers from an API server that does what real ones do on bad days."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config_workers import DiscoveryConfig
from gateway.errors import ConfigError
from gateway.fleet.discovery.discovery import Discovery
from gateway.fleet.discovery.found import Reporter
from gateway.fleet.registry import Registry, State, Worker
from tests.integration.engine import Engine, until
from tests.kube import ApiServer, pod, service

NEVER_S = 1000.0
SOON_S = 0.1


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture
def registry() -> Registry:
    return Registry()


@asynccontextmanager
async def following(
    server: ApiServer, registry: Registry, relist_s: float = NEVER_S, **changes: Any
) -> AsyncIterator[Reporter]:
    """Discovery of the server's pods that joins them unasked, and lists anew only after a fault unless told."""
    kubernetes = {
        "selector": "app=vllm",
        "namespaces": ["ai"],
        "relist_s": relist_s,
        "api_url": server.url,
        "worker": {"kv_events_port": 5557},
    }
    config = DiscoveryConfig.model_validate({"kubernetes": [kubernetes | changes]})
    discovery = Discovery(config, registry)
    await discovery.start()
    try:
        yield discovery.reporters[0]
    finally:
        await discovery.close()


def names(registry: Registry) -> set[str]:
    return set(registry.workers)


def have(registry: Registry, *expected: str) -> Callable[[], bool]:
    return lambda: names(registry) == set(expected)


async def test_pods_that_are_there_and_pods_that_come_and_go(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry) as source:
        await until(have(registry, "a"))
        await until(lambda: server.watching == 1)
        server.put(pod("b", "127.0.0.2"))
        await until(have(registry, "a", "b"))
        server.delete("a")
        await until(have(registry, "b"))
        assert (source.errors, source.problem) == (0, "")
    assert names(registry) == {"b"}  # the workers stay when the looking ends


async def test_the_server_is_asked_for_what_matches_and_with_our_token(
    server: ApiServer, registry: Registry, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    server.token = "first"
    server.put(pod("a"))
    async with following(server, registry, token_file=token):
        await until(lambda: server.watching == 1)
        (path, first), (_, watch) = (asked for asked in server.asked if "/nodes/" not in asked[0])
        assert path == "/api/v1/namespaces/ai/pods"
        assert first["labelSelector"] == watch["labelSelector"] == "app=vllm"
        assert (watch["resourceVersion"], watch["allowWatchBookmarks"]) == ("101", "true")
        token.write_text("second")  # tokens are rotated
        server.token = "second"
        server.put(pod("b", "127.0.0.2"))
        server.cut()
        await until(have(registry, "a", "b"))
        await until(lambda: server.watching == 1)


async def test_a_server_that_is_named_does_not_learn_our_own_clusters_token(
    server: ApiServer, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.discovery.kube_api._ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("ours")
    server.token = ""
    server.put(pod("a"))
    async with following(server, registry):
        await until(have(registry, "a"))


async def test_a_list_comes_in_pages_and_begins_anew_where_they_have_expired(
    server: ApiServer, registry: Registry
) -> None:
    server.page = 2
    for number in range(5):
        server.put(pod(f"p{number}", f"127.0.0.{number + 1}"))
    server.faults.add("page")
    async with following(server, registry) as source:
        await until(lambda: len(registry.workers) == 5)
        assert server.count(watches=False) == 2 + 3
        assert source.errors == 0


async def test_a_watch_cut_in_the_middle_of_a_line_is_followed_by_a_list(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    server.put(pod("b", "127.0.0.2"))
    async with following(server, registry):
        await until(lambda: server.watching == 1)
        server.delete("a", quietly=True)
        server.cut()
        await until(have(registry, "b"))
        await until(lambda: server.watching == 1)
        server.put(pod("c", "127.0.0.3"))
        await until(have(registry, "b", "c"))


async def test_a_delete_that_no_watch_told_is_seen_by_the_next_list(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    server.put(pod("b", "127.0.0.2"))
    async with following(server, registry, relist_s=SOON_S) as source:
        await until(lambda: server.watching == 1)
        server.delete("a", quietly=True)
        await until(have(registry, "b"))
        assert source.errors == 0
        later = [query for path, query in server.asked if path.endswith("/pods") and "watch" not in query][1:]
        assert {query["resourceVersionMatch"] for query in later} == {"NotOlderThan"}


async def test_a_watch_that_the_server_ends_in_time_is_followed_on_the_same_connection(
    server: ApiServer, registry: Registry
) -> None:
    server.put(pod("a"))
    server.zones["node-1"] = "zone-a"
    async with following(server, registry, relist_s=2.0) as source:
        await until(lambda: server.watching == 1 and "a" in registry.workers)
        connections = server.connections
        await until(lambda: server.count(watches=True) == 2)
        assert (source.errors, server.connections) == (0, connections)


async def test_a_watch_that_ends_early_is_a_failure_that_is_recovered_from(
    server: ApiServer, registry: Registry
) -> None:
    async with following(server, registry) as source:
        await until(lambda: server.watching == 1)
        server.put(pod("a"), quietly=True)
        server.cut(half=b"")  # an empty chunk is the end
        await until(have(registry, "a"))
        assert "ended early" in source.problem or source.problem == ""
        assert source.errors == 1


async def test_a_version_that_is_gone_leads_to_a_list(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry) as source:
        await until(lambda: server.watching == 1)
        server.put(pod("b", "127.0.0.2"), quietly=True)
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        server.say("ERROR", gone)
        await until(have(registry, "a", "b"))
        await until(lambda: server.count(watches=True) == 2)
        assert source.errors == 0


async def test_a_watch_that_is_refused_as_gone_leads_to_a_list(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    server.faults.add("version")
    async with following(server, registry) as source:
        await until(lambda: server.watching == 1)
        assert (server.count(watches=False), server.count(watches=True), source.errors) == (2, 2, 0)
        assert "resourceVersion" not in server.asked[-2][1]  # the newest, not one from a cache


async def test_bookmarks_and_duplicates_change_nothing(server: ApiServer, registry: Registry) -> None:
    server.put(thing := pod("a"))
    async with following(server, registry, relist_s=0.5):
        await until(lambda: server.watching == 1 and "a" in registry.workers)
        worker = registry.workers["a"]
        for _ in range(3):
            server.say("ADDED", thing)
            server.say("MODIFIED", thing)
        server.bookmark()
        await until(lambda: server.count(watches=False) == 2)
        last = [query for path, query in server.asked if path.endswith("/pods") and "watch" not in query][-1]
        assert last["resourceVersion"] == "102"  # the bookmark's
        assert registry.workers["a"] is worker


async def test_what_has_not_changed_keeps_its_worker_its_slot_and_its_requests(
    server: ApiServer, registry: Registry
) -> None:
    server.put(pod("a"))
    async with following(server, registry, relist_s=SOON_S):
        await until(have(registry, "a"))
        worker = registry.workers["a"]
        worker.slot = 7
        left: list[Worker] = []
        registry.on_change(lambda worker, joined: None if joined else left.append(worker))
        for number in range(2, 5):
            server.put(pod(f"p{number}", f"127.0.0.{number}"))
            server.put(pod("a", labels={"touched": str(number)}))
            await until(lambda number=number: f"p{number}" in registry.workers)
        assert (registry.workers["a"], worker.slot, left) == (worker, 7, [])


async def test_a_pod_joins_when_it_is_ready_and_has_an_address(server: ApiServer, registry: Registry) -> None:
    async with following(server, registry):
        await until(lambda: server.watching == 1)
        server.put(pod("a", ip="", ready=False))
        server.put(pod("a", ready=False))
        server.put(pod("other", "127.0.0.9"))
        await until(have(registry, "other"))
        server.put(pod("a"))
        await until(have(registry, "a", "other"))


async def test_a_pod_that_is_not_ready_for_a_while_is_drained_and_comes_back(
    server: ApiServer, registry: Registry
) -> None:
    server.put(pod("a"))
    async with following(server, registry):
        await until(lambda: server.watching == 1 and "a" in registry.workers)
        worker = registry.workers["a"]
        registry.set_state(worker, State.READY)
        server.put(pod("a", ready=False))
        await until(lambda: worker.state is State.DRAINING)
        server.put(pod("a"))
        await until(lambda: worker.state is State.STARTING)
        assert registry.workers["a"] is worker


async def test_a_terminating_pod_finishes_what_it_has_until_it_is_gone(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry):
        await until(lambda: server.watching == 1 and "a" in registry.workers)
        worker = registry.workers["a"]
        server.put(pod("a", deletionTimestamp="2026-01-01T00:00:00Z"))
        await until(lambda: worker.state is State.DRAINING)
        assert names(registry) == {"a"}
        server.delete("a")
        await until(have(registry))


async def test_a_pod_may_have_the_address_of_one_that_is_terminating(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry):
        await until(have(registry, "a"))
        server.put(pod("a", deletionTimestamp="2026-01-01T00:00:00Z"))
        server.put(pod("b"))
        await until(have(registry, "b"))


async def test_a_worker_that_an_operator_drains_stays_drained(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry):
        await until(lambda: server.watching == 1 and "a" in registry.workers)
        registry.set_state(registry.workers["a"], State.DRAINING)
        server.put(pod("b", "127.0.0.2"))
        await until(have(registry, "a", "b"))
        assert registry.workers["a"].state is State.DRAINING


@pytest.mark.parametrize("change", [{"ip": "127.0.0.5"}, {"uid": "another"}])
async def test_a_pod_with_another_address_or_life_is_another_worker(
    server: ApiServer, registry: Registry, change: dict[str, str]
) -> None:
    server.put(pod("a"))
    async with following(server, registry):
        await until(lambda: server.watching == 1 and "a" in registry.workers)
        before = registry.workers["a"]
        server.put(pod("a", **change))
        await until(lambda: registry.workers.get("a") is not before and "a" in registry.workers)
        assert before.row == -1
        assert registry.workers["a"].host == change.get("ip", "127.0.0.1")


async def test_a_pod_that_loses_its_address_leaves(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry):
        await until(lambda: server.watching == 1)
        server.put(pod("a", ip=""))
        await until(have(registry))


async def test_the_fleet_stays_while_the_server_is_away_or_slow(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry, relist_s=SOON_S) as source:
        await until(have(registry, "a"))
        await server.stop()
        await until(lambda: source.errors >= 2)
        assert names(registry) == {"a"} and source.problem
        server.lists.clear()
        server.put(pod("b", "127.0.0.2"))
        asked = server.count(watches=False)
        await server.start()
        await until(lambda: server.count(watches=False) > asked)
        assert names(registry) == {"a"}
        server.lists.set()
        await until(have(registry, "a", "b"))
        assert source.problem == ""


async def test_an_answer_that_is_no_list_takes_no_worker_away(server: ApiServer, registry: Registry) -> None:
    server.put(pod("a"))
    async with following(server, registry, relist_s=SOON_S) as source:
        await until(have(registry, "a"))
        server.refusal = 200, {}, "please log in"
        await until(lambda: "no list of pods" in source.problem)
        assert names(registry) == {"a"}
        server.refusal = None
        await until(lambda: source.problem == "")


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "token of the service account is not accepted"),
        (403, "give the service account a Role with list and watch on pods"),
    ],
)
async def test_a_refusal_says_what_to_do_and_is_logged_once(
    server: ApiServer, registry: Registry, caplog: pytest.LogCaptureFixture, status: int, advice: str
) -> None:
    server.refusal = status, {}, "nobody may"
    server.put(pod("a"))
    with caplog.at_level(logging.WARNING, "kvway.discovery"):
        async with following(server, registry) as source:
            await until(lambda: source.errors >= 3)
            assert advice in source.problem and "nobody may" in source.problem
            assert sum(advice in record.message for record in caplog.records) == 1
            server.refusal = None
            await until(have(registry, "a"))
            assert source.problem == ""


async def test_a_server_that_is_busy_is_left_alone_as_long_as_it_says(server: ApiServer, registry: Registry) -> None:
    server.refusal = 429, {"Retry-After": "30"}, "too many requests"
    async with ApiServer() as other:
        other.refusal = 500, {}, "etcd is away"
        async with following(server, registry) as source, following(other, Registry()) as hurried:
            await until(lambda: hurried.errors >= 3)
            assert (source.errors, len(server.asked)) == (1, 1)


async def test_one_namespace_that_is_refused_does_not_keep_the_others_out(
    server: ApiServer, registry: Registry
) -> None:
    async with ApiServer() as other:
        other.refusal = 403, {}, "not here"
        server.put(pod("a"))
        kubernetes = [{"selector": "a=b", "api_url": each.url, "namespaces": ["ai"]} for each in (other, server)]
        for each in kubernetes:
            each["worker"] = {"kv_events_port": 5557}
        discovery = Discovery(DiscoveryConfig.model_validate({"kubernetes": kubernetes}), registry)
        await discovery.start()
        await until(have(registry, "a"))
        assert [bool(source.problem) for source in discovery.reporters] == [True, False]
        await discovery.close()


async def test_a_pod_that_makes_no_sense_is_left_out_alone(
    server: ApiServer, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(pod("a"))
    server.put(pod("b", "127.0.0.2", annotations={"kvway.io/port": "http"}))
    async with following(server, registry, relist_s=SOON_S) as source:
        await until(have(registry, "a"))
        assert [message for message in source.refused if "kvway.io/port is 'http'" in message]
        await until(lambda: server.count(watches=False) >= 3)
        assert sum("kvway.io/port" in record.message for record in caplog.records) == 1
        server.put(pod("b", "127.0.0.2"))
        await until(have(registry, "a", "b"))


async def test_the_zone_comes_from_the_pods_label_or_its_node(server: ApiServer, registry: Registry) -> None:
    server.zones["node-1"] = "zone-of-node"
    server.put(pod("a"))
    server.put(pod("b", "127.0.0.2", labels={"topology.kubernetes.io/zone": "zone-of-pod"}))
    async with following(server, registry, relist_s=SOON_S):
        await until(have(registry, "a", "b"))
        assert registry.workers["a"].config.domain == "zone-of-node"
        assert registry.workers["b"].config.domain == "zone-of-pod"
        await until(lambda: server.count(watches=False) >= 3)
        assert sum("/nodes/" in path for path, _ in server.asked) == 1


async def test_without_the_right_to_see_nodes_workers_have_no_domain(
    server: ApiServer, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(pod("a"))
    caplog.set_level(logging.INFO, "kvway.discovery")
    async with following(server, registry, relist_s=SOON_S) as source:
        await until(have(registry, "a"))
        worker = registry.workers["a"]
        server.zones["node-1"] = "too-late"
        await until(lambda: server.count(watches=False) >= 3)
        assert registry.workers["a"] is worker and worker.config.domain == ""
        assert source.errors == 0
    assert "give the service account a ClusterRole with get on nodes" in caplog.text


async def test_services_are_workers(server: ApiServer, registry: Registry) -> None:
    server.put(service("llama", "127.0.0.3", {"name": "http", "port": 80}))
    server.put(service("headless", "None"))
    async with following(server, registry, kind="services") as source:
        await until(have(registry, "llama"))
        assert registry.workers["llama"].config.url == "http://127.0.0.3:80"
        assert len(source.refused) == 1
        server.delete("llama")
        await until(have(registry))
        assert server.asked[0][0] == "/api/v1/namespaces/ai/services"


async def test_an_engine_is_asked_for_its_events_before_it_joins(server: ApiServer, registry: Registry) -> None:
    sources = b'{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": ""}}'
    async with Engine({"/kv_event_sources": (503, b"starting")}) as engine:
        server.put(pod("a", annotations={"kvway.io/port": str(engine.port)}))
        async with following(server, registry, worker={}):
            await until(lambda: "/kv_event_sources" in engine.asked)
            assert names(registry) == set()
            engine.answers["/kv_event_sources"] = sources
            await until(have(registry, "a"))
            events = registry.workers["a"].config.kv_events
            assert events is not None
            assert (events.endpoint, events.replay_endpoint) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


async def test_an_engine_with_several_ranks_is_as_many_workers(server: ApiServer, registry: Registry) -> None:
    info = b'{"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}}'
    async with Engine({"/server_info": info}) as engine:
        server.put(pod("a", annotations={"kvway.io/port": str(engine.port)}))
        async with following(server, registry, worker={}):
            await until(have(registry, "a-dp0", "a-dp1"))
            second = registry.workers["a-dp1"].config
            assert second.kv_events is not None
            assert (second.data_parallel_rank, second.kv_events.endpoint) == (1, "tcp://127.0.0.1:5558")
            server.put(pod("a", ready=False, annotations={"kvway.io/port": str(engine.port)}))
            await until(lambda: {worker.state for worker in registry.workers.values()} == {State.DRAINING})
            server.delete("a")
            await until(have(registry))


@pytest.mark.parametrize("endpoint", ["inproc://events", "tcp://*", "tcp://*:70000"])
async def test_an_engine_whose_events_cannot_be_reached_joins_without(
    endpoint: str, server: ApiServer, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine({"/kv_event_sources": b'{"0": {"endpoint": "%b"}}' % endpoint.encode()}) as engine:
        server.put(pod("a", annotations={"kvway.io/port": str(engine.port)}))
        async with following(server, registry, worker={}):
            await until(have(registry, "a"))
            assert registry.workers["a"].config.kv_events is None
    assert "/kv_event_sources cannot be used" in caplog.text and "Traceback" not in caplog.text


async def test_an_engine_without_events_joins_without(server: ApiServer, registry: Registry) -> None:
    async with Engine() as engine:
        server.put(pod("a", annotations={"kvway.io/port": str(engine.port)}))
        async with following(server, registry, worker={}):
            await until(have(registry, "a"))
            assert registry.workers["a"].config.kv_events is None
            assert {"/kv_event_sources", "/server_info"} <= set(engine.asked)


async def test_in_a_cluster_the_server_is_the_clusters_and_must_show_its_certificate(
    registry: Registry, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    async with ApiServer(tls) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        server.put(pod("a"))
        async with following(server, Registry(), api_url=None) as stranger:
            await until(lambda: stranger.errors > 0)
            assert "certificate verify failed" in stranger.problem
        async with following(server, registry, api_url=None, ca_file=certificate[0]):
            await until(have(registry, "a"))


def test_outside_of_a_cluster_the_server_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = DiscoveryConfig.model_validate({"kubernetes": [{"selector": "app=vllm"}]})
    with pytest.raises(ConfigError, match=r"KUBERNETES_SERVICE_HOST is not set.*give api_url"):
        Discovery(config, Registry())
