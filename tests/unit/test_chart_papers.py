"""What goes with the chart: its schema, its documentation, alerts and dashboard, and the examples."""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from gateway import __version__
from gateway.app import Gateway
from gateway.config import Config
from tests import chart
from tests.chart import CHART, EXAMPLES, SIMULATED, example, find, manifests, render
from tests.processes import ROOT

GENERATE = "run: python helm/generate.py"
MONITORED = {"prometheusRule": {"enabled": True}, "grafanaDashboard": {"enabled": True}}
RECORDED = "kvway_in_flight_tokens"


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "helm" / "generate.py"))


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """Every metric that a gateway exposes, whatever is switched on."""
    found = {"dns": [{"name": "workers"}]}
    gateway = Gateway(Config.model_validate({"index": {"backend": "redis"}, "discovery": found}))
    return set(re.findall(r"^# TYPE (\S+)", gateway.observer.render().decode(), re.MULTILINE))


def test_the_schema_knows_the_configuration_as_it_is(generator):
    assert (CHART / "values.schema.json").read_text() == generator["schema"](), GENERATE


def test_every_value_is_documented_in_the_readme(generator):
    assert (CHART / "README.md").read_text() == generator["readme"](), GENERATE
    assert len({each.path for each in generator["values"]()}) > 100


def test_a_value_without_a_comment_is_refused(generator):
    node = yaml.compose("# -- Known.\na: 1\nb: 2\n")
    with pytest.raises(ValueError, match="b has no comment"):
        list(generator["_documented"](node, ["# -- Known.", "a: 1", "b: 2"], ""))


def test_the_schema_has_the_values_that_there_are_and_no_others():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def hold(described: dict[str, Any], values: Any, path: str) -> None:
        described = schema["$defs"][described["$ref"].rpartition("/")[2]] if "$ref" in described else described
        if "properties" not in described:
            return
        assert described["additionalProperties"] is False, f"{path} takes anything"
        if isinstance(values, dict) and path not in ("config", "resources", "startupProbe"):
            others = {"claims", "initialDelaySeconds", "successThreshold"} if path else {"global", "enabled"}
            assert described["properties"].keys() - others == values.keys(), path
            for key, value in values.items():
                hold(described["properties"][key], value, f"{path}.{key}".lstrip("."))

    hold(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")


def test_the_chart_has_the_version_of_the_package():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == about["version"] == __version__


def rules(*more: dict[str, Any]) -> list[dict[str, Any]]:
    groups = find(render(SIMULATED, MONITORED, *more), "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads(find(render(SIMULATED, MONITORED), "ConfigMap", "kvway-dashboard")["data"]["kvway.json"])
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [rule["expr"] for rule in rules()] + [each.replace("$__rate_interval", "1m") for each in shown]


@pytest.mark.parametrize("expression", expressions())
def test_alerts_and_panels_ask_for_metrics_that_there_are(expression, metrics):
    promql_parser.parse(expression)
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvway_\w+", expression)}
    assert asked and asked <= metrics, asked - metrics


def test_alerts_are_about_this_release_only_and_say_what_to_do():
    assert [rule["record"] for rule in rules() if "record" in rule] == [RECORDED]
    for rule in rules():
        matched = re.findall(r'namespace="llm",pod=~"([^"]+)"', rule["expr"])
        assert matched
        for pattern in matched:
            assert re.fullmatch(pattern, "kvway-5d4f8b7c9-x2x4z")
            assert not re.fullmatch(pattern, "kvway-blue-5d4f8b7c9-x2x4z")  # of another release
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"].keys() == {
                "summary",
                "description",
            }


def test_replicas_that_drain_are_no_alert():
    values = {"config": {"server": {"drain_s": 1800}}}
    objects = render(SIMULATED, values)
    (alert,) = [rule for rule in rules(values) if rule.get("alert") == "KvwayReplicasApart"]
    assert int(alert["for"].removesuffix("s")) > chart.pod(objects)["terminationGracePeriodSeconds"]


def test_every_panel_has_a_place_of_its_own():
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels()):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_the_adapter_gives_the_autoscaler_the_metric_that_is_recorded():
    (rule,) = example("prometheus-adapter.yaml")["rules"]["custom"]
    assert rule["name"]["as"] == RECORDED and rule["seriesQuery"].startswith(RECORDED)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_examples_configure_the_fleets_they_come_with(engine):
    fleet = manifests(EXAMPLES / f"{engine}-fleet.yaml")
    for each in fleet:
        kubernetes_validate.validate(each, "1.37", strict=True)
    template = find(fleet, "Deployment", engine)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert "." not in container["image"].partition("/")[0]  # no registry's host
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    (flag,) = [each for each in container["args"] if each.startswith("--kv-events-config=")]
    events = json.loads(flag.partition("=")[2])
    assert (events["publisher"], events["endpoint"]) == ("zmq", f"tcp://*:{ports['kv-events']}")
    assert events["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
    assert events.get("enable_kv_cache_events", engine == "sglang")
    config = Config.model_validate(chart.config(render(example(f"values-{engine}.yaml"))))
    (source,) = config.discovery.kubernetes
    key, _, value = source.selector.partition("=")
    assert template["metadata"]["labels"][key] == value
    told = (source.worker.port, source.worker.kv_events_port, source.worker.kv_replay_port)
    assert told == (ports["http"], ports["kv-events"], ports["kv-replay"])
    (block,) = (int(flag.partition("=")[2]) for flag in container["args"] if re.match("--(block|page)-size", flag))
    assert config.prompt.chunk_tokens % block == 0
