"""The Helm chart: what it renders is what Kubernetes takes, for every way to install it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import lint
from helm_python.errors import HelmError
from typer.main import get_command

from gateway.cli import app
from gateway.config import Config
from gateway.index.redis_address import parse_url
from tests import chart
from tests.chart import SIMULATED, config, example, find, pod, render

WORKER = {"config": {"workers": [{"url": "http://w:8000"}]}}
VERSIONS = ("1.25", "1.31", "1.37")
OURS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute"}  # kinds that Kubernetes itself does not know
EVERYTHING: dict[str, Any] = {
    "tls": {"secretName": "cert"},
    "secretFiles": [{"name": "keys"}, {"name": "my.pull.secret"}],
    "env": [{"name": "KVWAY_LOG__LEVEL", "value": "debug"}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "extraVolumes": [{"name": "traces", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "traces", "mountPath": "/traces"}],
    "service": {"type": "NodePort", "nodePort": 30080, "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "networkPolicy": {"enabled": True, "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}]},
    "loadTest": {"enabled": True},
    "config": {"recorder": {"directory": "/traces"}},
}
DISCOVERY: dict[str, Any] = {"config": {"discovery": {"kubernetes": [{"selector": "app=vllm"}]}}}
TLS = {"enabled": True, "caSecret": "ca", "clientSecret": "client"}
WAYS: dict[str, list[dict[str, Any]]] = {
    "simulated": [example("values-simulated.yaml")],
    "vllm": [example("values-vllm.yaml")],
    "sglang": [example("values-sglang.yaml")],
    "production": [example("values-vllm.yaml"), example("values-production.yaml")],
    "alone": [WORKER, {"redis": {"mode": "none"}, "replicaCount": 1, "podDisruptionBudget": {"enabled": False}}],
    "valkey with a password": [WORKER, {"redis": {"passwordSecret": {"name": "redis"}}}],
    "one redis": [WORKER, {"redis": {"mode": "standalone", "hosts": ["r:6380"], "username": "me", "tls": TLS}}],
    "cluster": [WORKER, {"redis": {"mode": "cluster", "hosts": ["a", "b:7000"], "passwordSecret": {"name": "redis"}}}],
    "claim": [WORKER, {"tokenizer": {"source": "pvc", "pvc": {"claimName": "models", "subPath": "llama"}}}],
    "discovery": [DISCOVERY, {"rbac": {"nodes": True}}],
    "pod monitor": [WORKER, {"podMonitor": {"enabled": True, "relabelings": [{"action": "drop"}]}}],
    "route": [WORKER, {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gw"}], "hostnames": ["kvway.example"]}}],
    "everything": [SIMULATED, EVERYTHING],
    "numbers and signs for names": [
        {"simulatedWorkers": {"enabled": True, "model": "org/m: x #1"}},
        {"redis": {"passwordSecret": {"name": "0123", "key": "1"}, "bundled": {"maxMemory": "536870912"}}},
        {"tokenizer": {"source": "pvc", "pvc": {"claimName": "42", "subPath": "2026"}}},
        {"tls": {"secretName": "7"}, "secretFiles": [{"name": "1e3"}], "priorityClassName": "100"},
        {"ingress": {"enabled": True, "className": "1"}},
    ],
    "load test of the documentation": [SIMULATED, *chart.documented("load-testing.md")],
}

# Else every object has all of a version's definitions read anew, which takes longer than everything else here.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

every_way = pytest.mark.parametrize("layers", WAYS.values(), ids=WAYS)


@cache
def mistake(text: str, version: str) -> str:
    """Return what Kubernetes of a version would not take of an object; empty for nothing."""
    try:
        kubernetes_validate.validate(json.loads(text), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{list(error.path)}: {error.message}"
    return ""


@every_way
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(layers, version):
    for each in render(*layers):
        if each["kind"] not in OURS:
            assert mistake(json.dumps(each, sort_keys=True), version) == "", each["metadata"]["name"]


def test_an_image_as_volume_is_taken_where_kubernetes_has_it():
    objects = render(WORKER, {"tokenizer": {"source": "image", "image": {"reference": "tokenizers:1"}}})
    assert {"name": "tokenizers", "image": {"reference": "tokenizers:1", "pullPolicy": "IfNotPresent"}} in pod(objects)[
        "volumes"
    ]
    for version in ("1.33", "1.37"):
        assert mistake(json.dumps(find(objects, "Deployment")), version) == ""


@every_way
def test_helm_lint_finds_nothing(layers):
    report = lint(chart.CHART, chart.merged(*layers), strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == [] == report["errors"]


@every_way
def test_the_configuration_is_one_that_the_gateway_takes(layers):
    Config.model_validate(config(render(*layers)))


@every_way
def test_no_container_may_do_more_than_it_must(layers):
    specs = [each["spec"]["template"]["spec"] for each in render(*layers) if "template" in each.get("spec", {})]
    for spec in specs:
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert spec["enableServiceLinks"] is False  # KVWAY_PORT and its like are not for the gateway
        for container in spec["containers"] + spec.get("initContainers", []):
            may = container["securityContext"]
            assert may["readOnlyRootFilesystem"] and not may["allowPrivilegeEscalation"]
            assert may["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"]
            assert not re.match(r"[^/:]*[.]", container["image"])  # no registry's host


@every_way
def test_every_mount_has_its_volume_and_every_object_its_own_name(layers):
    objects = render(*layers)
    for spec in (each["spec"]["template"]["spec"] for each in objects if "template" in each.get("spec", {})):
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounts = [mount for container in spec["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes
        assert all(re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in volumes)
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


@every_way
def test_containers_run_commands_that_there_are(layers):
    kvway = get_command(app)
    specs = [each["spec"]["template"]["spec"] for each in render(*layers) if "template" in each.get("spec", {})]
    for container in (container for spec in specs for container in spec["containers"] if "args" in container):
        name, *words = container["args"]
        kvway.commands[name].make_context(name, words)  # refuses what it does not know


@pytest.mark.parametrize("name", chart.GOLDEN)
def test_what_is_rendered_is_what_is_kept(name):
    assert chart.golden(name) == chart.golden_file(name).read_text(), "run: python -m tests.chart, and read the diff"


def test_a_pod_has_time_to_leave_the_load_balancers_and_to_drain():
    def times(**values: Any) -> tuple[int, int, int]:
        objects = render(SIMULATED, values)
        spec = pod(objects)
        sleep = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        return int(sleep[1]), config(objects)["server"]["drain_s"], spec["terminationGracePeriodSeconds"]

    assert times() == (10, 300, 325)
    assert times(preStopSleepSeconds=5, config={"server": {"drain_s": 59.5}}) == (5, 59.5, 80)
    assert times(terminationGracePeriodSeconds=310) == (10, 300, 310)


def test_probes_lead_where_they_ask_no_worker_but_readiness():
    container = pod(render(SIMULATED))["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 8000, "admin": 8001}
    assert (
        container["startupProbe"]["httpGet"]
        == container["livenessProbe"]["httpGet"]
        == {
            "path": "/health",
            "port": "admin",
        }
    )
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTP"}


def test_with_a_certificate_clients_and_probes_speak_https():
    objects = render(SIMULATED, {"tls": {"secretName": "cert"}})
    assert pod(objects)["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert config(objects)["server"]["tls_cert"] == "/etc/kvway/tls/tls.crt"


def test_with_a_certificate_that_config_names_they_do_too():
    by_hand = {"config": {"server": {"tls_cert": "/etc/kvway/secrets/a/tls.crt", "tls_key": "/etc/kvway/secrets/a/k"}}}
    values: list[dict[str, Any]] = [SIMULATED, by_hand, {"secretFiles": [{"name": "a"}], "loadTest": {"enabled": True}}]
    objects = render(*values)
    assert pod(objects)["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert "--url=https://kvway:80" in load_test(objects)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "https://kvway.llm.svc" in chart.notes(*values)


def test_a_change_of_the_configuration_rolls_the_pods():
    def checksum(**server: Any) -> str:
        objects = render(SIMULATED, {"config": {"server": server}})
        annotations = find(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return annotations["checksum/config"]

    assert checksum() == checksum() != checksum(keep_alive_s=10)


def test_large_and_small_numbers_reach_the_gateway_as_they_were_written():
    values = {"index": {"max_chunks": 25_000_000}, "server": {"max_body_bytes": 2**30}}
    values |= {"workers": [{"url": "http://w:1", "prefill": {"b_s": 0.000001, "c_s": 1.05e-9}}]}
    taken = Config.model_validate(config(render({"config": values})))
    assert (taken.index.max_chunks, taken.server.max_body_bytes) == (25_000_000, 2**30)
    assert (taken.workers[0].prefill.b_s, taken.workers[0].prefill.c_s) == (1e-6, 1.05e-9)


@pytest.mark.parametrize(
    ("redis", "kind", "addresses"),
    [
        ({"mode": "bundled"}, "one", [("kvway-valkey", 6379)]),
        ({"mode": "standalone", "hosts": ["r:6380"], "database": 3}, "one", [("r", 6380)]),
        ({"mode": "sentinel", "hosts": ["s1", "[fd00::1]:1"]}, "sentinel", [("s1", 26379), ("fd00::1", 1)]),
        ({"mode": "cluster", "hosts": ["a:1", "b:2"], "tls": {"enabled": True}}, "cluster", [("a", 1), ("b", 2)]),
    ],
)
def test_redis_is_found_where_it_is_said_to_be(redis, kind, addresses):
    place = parse_url(config(render(WORKER, {"redis": redis}))["index"]["url"])
    assert (place.kind, list(map(tuple, place.addresses))) == (kind, addresses)
    assert place.db == redis.get("database", 0) and place.tls == redis.get("tls", {}).get("enabled", False)


def test_passwords_come_from_secrets_only():
    objects = render(WORKER, example("values-production.yaml"))
    index = config(objects)["index"]
    assert index["password_file"] == "/etc/kvway/redis-password/password"
    assert index["tls_ca"] == "/etc/kvway/redis-ca/ca.crt" and "password" not in index
    assert index["sentinel_password_file"] == "/etc/kvway/sentinel-password/password"
    (volume,) = [each for each in pod(objects)["volumes"] if each["name"] == "sentinel-password"]
    assert volume["secret"]["secretName"] == "redis-sentinel"
    assert volume["secret"]["items"] == [{"key": "password", "path": "password"}]
    assert not [each for each in objects if each["kind"] == "Secret"]


def test_what_config_says_wins_over_what_the_chart_adds():
    objects = render(SIMULATED, {"config": {"index": {"backend": "memory"}, "models": {"sim": {"source": "bytes"}}}})
    assert config(objects)["index"]["backend"] == "memory" and config(objects)["models"]["sim"]["source"] == "bytes"


def test_simulated_workers_come_after_those_in_config():
    names = [each.get("name") for each in config(render(SIMULATED, WORKER))["workers"]]
    assert names == [None, "sim-0", "sim-1", "sim-2", "sim-3"]


def test_downloaded_tokenizers_are_wired_into_the_models():
    def models(*repositories: str) -> Any:
        download = {"source": "download", "download": {"repositories": repositories}}
        return config(render(WORKER, {"tokenizer": download}))["models"]

    assert models("org/a") == {"*": {"tokenizer": "/tokenizers/org/a"}}
    assert models("org/a", "org/b") == {f"org/{x}": {"tokenizer": f"/tokenizers/org/{x}"} for x in "ab"}


def test_only_discovery_gives_the_gateway_rights_and_these_only_read():
    def roles(*layers: dict[str, Any]) -> list[Any]:
        return [each for each in render(*layers) if each["kind"] in ("Role", "ClusterRole")]

    assert roles(SIMULATED) == [] and pod(render(SIMULATED))["automountServiceAccountToken"] is False
    assert pod(render(DISCOVERY))["automountServiceAccountToken"] is True
    (role,) = roles(DISCOVERY)
    assert (role["kind"], role["metadata"]["namespace"]) == ("Role", chart.NAMESPACE)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    (*_, of_nodes) = roles(DISCOVERY, {"rbac": {"nodes": True}})
    assert of_nodes["kind"] == "ClusterRole" and of_nodes["rules"][0]["resources"] == ["nodes"]
    assert roles(DISCOVERY, {"rbac": {"create": False}}) == []


def test_discovery_may_look_where_it_is_told_to_and_nowhere_else():
    sources = [
        {"selector": "app=a", "namespaces": ["x", "y"]},
        {"selector": "app=b", "namespaces": ["y"], "kind": "services"},
        {"selector": "app=c", "namespaces": ["z"], "api_url": "https://other:6443"},
    ]
    objects = render({"config": {"discovery": {"kubernetes": sources}}})
    roles = {each["metadata"]["namespace"]: each["rules"][0]["resources"] for each in objects if each["kind"] == "Role"}
    assert roles == {"x": ["pods"], "y": ["pods", "services"]}


def test_pods_that_are_all_replaced_at_once_have_no_rolling_update():
    assert find(render(WORKER, {"strategy": {"type": "Recreate"}}), "Deployment")["spec"]["strategy"] == {
        "type": "Recreate"
    }
    slower = find(render(WORKER, {"strategy": {"rollingUpdate": {"maxSurge": 2}}}), "Deployment")["spec"]["strategy"]
    assert slower == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}}


def test_the_environment_has_what_users_give_once():
    """Server-side apply refuses a name that comes twice."""
    home = [{"name": "HF_HOME", "value": "/models"}]
    tokenizer = {"source": "download", "download": {"repositories": ["org/a"], "env": home}}
    spec = pod(render(WORKER, {"env": home, "tokenizer": tokenizer}))
    assert [container["env"] for container in spec["containers"] + spec["initContainers"]] == [home, home]


def sections(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield (*path, key)
            yield from sections(value, (*path, key))


SECTIONS = list(sections(yaml.safe_load((chart.CHART / "values.yaml").read_text())))


@pytest.mark.parametrize("path", SECTIONS, ids=".".join)
def test_a_section_with_nothing_in_it_is_taken_or_named(path):
    """What is written as ``redis:`` with all its keys commented out is null, and Helm takes the defaults away, too."""
    empty: Any = None
    for key in reversed(path):
        empty = {key: empty}
    try:
        objects = render(SIMULATED, empty)
    except HelmError as error:
        assert f"missing property '{path[-1]}'" in str(error)
    else:
        assert {mistake(json.dumps(each, sort_keys=True), "1.37") for each in objects} == {""}


def test_a_chart_that_depends_on_it_may_switch_it_on_and_pass_it_globals():
    render(SIMULATED, {"enabled": True, "global": {"imageRegistry": "x"}})
    with pytest.raises(HelmError, match="/enabled"):
        render(SIMULATED, {"enabled": False})


def test_the_autoscaler_takes_over_the_number_of_replicas():
    objects = render(WORKER, {"autoscaling": {"enabled": True, "targetInFlightTokens": 2_000_000}})
    assert "replicas" not in find(objects, "Deployment")["spec"]
    cpu, tokens = find(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert cpu["resource"]["target"] == {"type": "Utilization", "averageUtilization": 70}
    assert tokens["pods"]["target"] == {"type": "AverageValue", "averageValue": "2000000"}


def test_selectors_reach_the_gateway_and_nothing_else():
    objects = render(SIMULATED, {"podDisruptionBudget": {"enabled": True}})
    for kind, name in (("Service", "kvway"), ("Service", "kvway-valkey"), ("Service", "kvway-sim")):
        selector = find(objects, kind, name)["spec"]["selector"].items()
        reached = [
            each["metadata"]["name"]
            for each in objects
            if each["kind"] in ("Deployment", "StatefulSet")
            and selector <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert reached == [name]


def test_monitors_select_the_admin_port_once():
    objects = render(WORKER, {"serviceMonitor": {"enabled": True}})
    selector = find(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    services = [
        each for each in objects if each["kind"] == "Service" and selector <= each["metadata"]["labels"].items()
    ]
    assert [each["metadata"]["name"] for each in services] == ["kvway-admin"]
    assert find(objects, "ServiceMonitor")["spec"]["endpoints"][0]["port"] == services[0]["spec"]["ports"][0]["name"]


def test_names_of_digits_stay_names():
    sources = [{"selector": "app=a", "namespaces": ["42"]}]
    values = {"fullnameOverride": "kvway", "config": {"discovery": {"kubernetes": sources}}, "rbac": {"nodes": True}}
    objects = render(SIMULATED, values, {"serviceAccount": {"name": "99"}}, name="1234", namespace="0123")
    assert {mistake(json.dumps(each, sort_keys=True), "1.37") for each in objects} == {""}


@pytest.mark.parametrize("name", ["1234", "a.b"])
def test_a_release_whose_name_no_service_can_have_is_told_what_to_do(name):
    with pytest.raises(HelmError, match=f"cannot be called {name}-kvway.*set fullnameOverride"):
        render(SIMULATED, name=name)


def test_two_releases_in_one_namespace_do_not_meet():
    first, second = ({(e["kind"], e["metadata"]["name"]) for e in render(SIMULATED, name=n)} for n in ("a", "b"))
    assert not first & second


def test_releases_of_one_name_in_two_namespaces_do_not_meet_where_they_look_for_workers():
    values: dict[str, Any] = {"config": {"discovery": {"kubernetes": [{"selector": "app=a", "namespaces": ["fleet"]}]}}}
    first, second = (
        {(e["kind"], e["metadata"]["name"]) for e in render(values, namespace=n) if "Role" in e["kind"]}
        for n in ("one", "two")
    )
    assert first and not first & second


def load_test(objects: list[chart.Object]) -> chart.Object:
    (job,) = [each for each in objects if each["kind"] == "Job"]
    return job


def test_a_load_test_that_is_changed_is_another_job_also_without_revisions():
    def job(**values: Any) -> chart.Object:
        return load_test(render(SIMULATED, {"loadTest": {"enabled": True}}, values, name="a-long-name" * 4))

    names = {
        job(**values)["metadata"]["name"] for values in ({}, {"image": {"tag": "2"}}, {"nodeSelector": {"a": "b"}})
    }
    assert len(names) == 3 and max(map(len, names)) < 60
    assert job() == job()


def test_the_bundled_valkey_may_run_as_whom_the_cluster_chooses():
    def valkey(**own: Any) -> Any:
        objects = render(SIMULATED, {"redis": {"bundled": {"securityContext": own}}})
        return pod(objects, name="kvway-valkey")["containers"][0]["securityContext"]

    assert valkey()["runAsUser"] == 999  # root is the user of its image
    chosen = valkey(runAsUser=None)
    assert "runAsUser" not in chosen and chosen["readOnlyRootFilesystem"]


def test_the_load_test_reaches_the_gateway_whoever_else_may_not():
    some = {"namespaceSelector": {"matchLabels": {"team": "chat"}}}
    more = {"from": [{"podSelector": {}}], "ports": [{"port": 5557}]}
    objects = render(SIMULATED, {"networkPolicy": {"enabled": True, "from": [some], "ingress": [more]}})
    public, admin, last = find(objects, "NetworkPolicy")["spec"]["ingress"]
    load = load_test(render(SIMULATED, {"loadTest": {"enabled": True}}))
    selector = public["from"][0]["podSelector"]["matchLabels"].items()
    assert selector <= load["spec"]["template"]["metadata"]["labels"].items()
    assert public["from"][1:] == [some] and admin["ports"] == [{"port": 8001}] and last == more


def test_the_load_test_sends_a_key_and_trusts_an_authority_that_secrets_hold():
    values = {"enabled": True, "apiKeySecret": {"name": "client"}, "caSecret": "authority"}
    pod = load_test(render(SIMULATED, {"loadTest": values}))["spec"]["template"]["spec"]
    (load,) = pod["containers"]
    key, authority = load["env"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": "client", "key": "api-key"}}
    (mounted,) = [mount for mount in load["volumeMounts"] if authority["value"].startswith(mount["mountPath"])]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mounted["name"]]
    assert key["name"] == "OPENAI_API_KEY" and authority["name"] == "SSL_CERT_FILE"
    assert volume["secret"]["secretName"] == "authority"


def test_notes_warn_of_replicas_that_know_nothing_of_each_other():
    assert "WARNING" in chart.notes(WORKER, {"redis": {"mode": "none"}})
    assert "WARNING" not in chart.notes(WORKER) and "simulated" in chart.notes(SIMULATED)


MISTAKES = [
    ({}, "there are no workers"),
    (SIMULATED | {"replicaCout": 2}, "replicaCout"),
    (SIMULATED | {"image": {"repo": "x"}}, "/image.*repo"),
    (SIMULATED | {"replicaCount": "two"}, "/replicaCount"),
    (SIMULATED | {"service": {"type": "Cluster"}}, "/service/type"),
    (SIMULATED | {"livenessProbe": {"path": "/health"}}, "/livenessProbe.*path"),
    (SIMULATED | {"config": {"server": {"prt": 1}}}, "/config/server.*prt"),
    (SIMULATED | {"config": {"policy": {"nam": "x"}}}, "/config/policy.*nam"),
    (SIMULATED | {"config": {"workers": [{"url": "http://a:1", "kv_event": {}}]}}, "/config/workers/0.*kv_event"),
    (SIMULATED | {"config": {"models": {"x": {"tokeniser": "a"}}}}, "/config/models/x.*tokeniser"),
    (SIMULATED | {"config": {"server": {"port": 0}}}, "config.server.port"),
    (SIMULATED | {"config": {"server": {"admin_port": 8000}}}, "are both 8000"),
    (SIMULATED | {"config": {"server": {"admin_host": "127.0.0.1"}}}, "config.server.admin_host is 127.0.0.1"),
    (SIMULATED | {"config": {"server": {"admin_host": None}}}, "/config/server.*admin_host"),
    (SIMULATED | {"config": {"server": {"host": "::1"}}}, "config.server.host is ::1"),
    (SIMULATED | {"env": [{"name": "KVWAY_SERVER__PORT", "value": "9000"}]}, "KVWAY_SERVER__PORT past the chart"),
    (SIMULATED | {"env": [{"name": "KVWAY_SERVER__TLS_CERT", "value": "/a"}]}, "KVWAY_SERVER__TLS_CERT past the chart"),
    (SIMULATED | {"config": {"server": {"drain_s": None}}}, "/config/server.*drain_s"),
    (SIMULATED | {"config": {"server": None}}, "/config.*server"),
    (SIMULATED | {"startupProbe": None}, "'': missing property 'startupProbe'"),
    (SIMULATED | {"redis": {"passwordSecret": {"name": "redis", "key": None}}}, "/redis/passwordSecret.*'key'"),
    (SIMULATED | {"image": {"repository": "kvway@sha256:0"}}, "/image/repository"),
    (SIMULATED | {"service": {"nodePort": 30080}}, "service.nodePort is for"),
    (SIMULATED | {"secretFiles": [{"name": "a"}, {"name": "a"}]}, "/secretFiles"),
    (SIMULATED | {"config": {"index": {"password": "x"}}}, "redis.passwordSecret"),
    (SIMULATED | {"config": {"index": {"url": "redis://:x@h"}}}, "redis.passwordSecret"),
    (SIMULATED | {"config": {"recorder": {"salt": "x"}}}, "KVWAY_RECORDER__SALT"),
    (
        {"config": {"discovery": {"kubernetes": [{"selector": "app=a", "namespaces": ["*"]}]}}},
        "/config/discovery/kubernetes/0/namespaces",
    ),
    (SIMULATED | {"redis": {"mode": "sentinal"}}, "/redis/mode"),
    (SIMULATED | {"redis": {"mode": "cluster"}}, "redis.hosts must name"),
    (SIMULATED | {"redis": {"mode": "standalone", "hosts": ["a", "b"]}}, "one server"),
    (SIMULATED | {"redis": {"mode": "standalone", "hosts": ["a:redis"]}}, "/redis/hosts/0"),
    (SIMULATED | {"redis": {"mode": "standalone", "hosts": ["fd00::1"]}}, "/redis/hosts/0"),
    (SIMULATED | {"redis": {"sentinelService": "my/primary"}}, "/redis/sentinelService"),
    (SIMULATED | {"redis": {"tls": {"enabled": True}}}, "redis.tls are for existing servers"),
    (SIMULATED | {"redis": {"username": "me"}}, "redis.username .* for existing servers"),
    (
        SIMULATED | {"redis": {"mode": "standalone", "hosts": ["a"], "tls": {"caSecret": "ca"}}},
        "nothing would be encrypted",
    ),
    (SIMULATED | {"redis": {"mode": "cluster", "hosts": ["a"], "database": 1}}, "no databases"),
    (SIMULATED | {"redis": {"sentinelPasswordSecret": {"name": "x"}}}, "is for redis.mode sentinel"),
    (SIMULATED | {"tokenizer": {"source": "pvc"}}, "claimName"),
    (SIMULATED | {"tokenizer": {"source": "image"}}, "reference"),
    (SIMULATED | {"tokenizer": {"source": "download"}}, "repositories"),
    (SIMULATED | {"terminationGracePeriodSeconds": 60}, "at least .* = 310"),
    (SIMULATED | {"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is above"),
    (SIMULATED | {"autoscaling": {"enabled": True, "targetCPUUtilizationPercentage": 0}}, "no target"),
    (SIMULATED | {"autoscaling": {"enabled": True}, "resources": {"requests": None}}, "resources.requests.cpu"),
    (SIMULATED | {"ingress": {"enabled": True, "hosts": []}}, "/ingress/hosts"),
    (SIMULATED | {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}, "enable one"),
    (SIMULATED | {"httpRoute": {"enabled": True}}, "parentRefs"),
    (SIMULATED | {"loadTest": {"url": "kvway:80"}}, "/loadTest/url"),
    (SIMULATED | {"loadTest": {"scenario": "chatt:sessions=5"}}, "/loadTest/scenario"),
    ({"simulatedWorkers": {"enabled": True, "profile": "llama-70b/h100/4"}}, "/simulatedWorkers/profile"),
    (SIMULATED | {"redis": {"bundled": {"maxMemory": "512 MB"}}}, "/redis/bundled/maxMemory"),
]


@pytest.mark.parametrize(("values", "named"), MISTAKES, ids=[named for _, named in MISTAKES])
def test_a_mistake_fails_the_install_and_is_named(values, named):
    with pytest.raises(HelmError, match=f"(?s){named}"):
        render(values)
