"""The Helm chart, rendered without Helm and without a cluster."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from tests.processes import ROOT

CHART = ROOT / "helm" / "kvway"
EXAMPLES = CHART / "examples"
RELEASE = "kvway"
NAMESPACE = "llm"
SIMULATED: dict[str, Any] = {"simulatedWorkers": {"enabled": True}}

Object = dict[str, Any]


def render(*layers: dict[str, Any], name: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """Return the objects of a release, with values of which later ones win."""
    files = _rendered(json.dumps(merged(*layers)), name, namespace)
    texts = (text for file, text in sorted(files.items()) if not file.endswith("NOTES.txt"))
    return [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each is not None]


def notes(*layers: dict[str, Any]) -> str:
    """Return what ``helm install`` prints."""
    return _rendered(json.dumps(merged(*layers)), RELEASE, NAMESPACE)["kvway/templates/NOTES.txt"]


@cache
def _rendered(values: str, name: str, namespace: str) -> dict[str, str]:
    with Chart.load(CHART) as chart:
        return chart.render(json.loads(values), name=name, namespace=namespace)


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge values as Helm does: mappings key by key, everything else whole."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def find(objects: list[Object], kind: str, name: str = RELEASE) -> Object:
    """Return the one object of a kind and a name."""
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pod(objects: list[Object], kind: str = "Deployment", name: str = RELEASE) -> Object:
    """Return the pod specification in a Deployment, StatefulSet or Job."""
    return find(objects, kind, name)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def config(objects: list[Object]) -> dict[str, Any]:
    """Return ``kvway.yaml`` as the gateway reads it."""
    return yaml.safe_load(find(objects, "ConfigMap")["data"]["kvway.yaml"])  # type: ignore[no-any-return]


def example(name: str) -> dict[str, Any]:
    """Return the values in a file of the examples."""
    return yaml.safe_load((EXAMPLES / name).read_text())  # type: ignore[no-any-return]


def documented(page: str) -> list[dict[str, Any]]:
    """Return what the YAML examples on a page of the documentation say."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(block) for block in blocks]


def manifests(file: Path) -> list[Object]:
    """Return the objects in a manifest."""
    return [each for each in yaml.safe_load_all(file.read_text()) if each is not None]


GOLDEN = {
    "simulated": [example("values-simulated.yaml")],
    "production": [example("values-vllm.yaml"), example("values-production.yaml")],
}
"""Values whose most important objects lie in tests/data/chart, for a change of templates to be seen in full."""

_KEPT = {
    "simulated": ("ConfigMap", "Service", "StatefulSet"),
    "production": ("Deployment", "HorizontalPodAutoscaler", "NetworkPolicy"),
}


def golden_file(name: str) -> Path:
    return ROOT / "tests" / "data" / "chart" / f"{name}.yaml"


def golden(name: str) -> str:
    """Return the objects of ``GOLDEN[name]`` as they are kept: without labels and checksums, texts as what they say."""
    objects = [each for each in render(*GOLDEN[name]) if each["kind"] in _KEPT[name]]
    for each in objects:
        del each["metadata"]["labels"]
        if each["kind"] == "ConfigMap":
            each["data"] = {file: yaml.safe_load(text) for file, text in each["data"].items()}
        if each["kind"] == "Deployment":
            del each["spec"]["template"]["metadata"]
    return yaml.safe_dump_all(objects, width=120)


if __name__ == "__main__":
    for each in GOLDEN:
        golden_file(each).parent.mkdir(exist_ok=True)
        golden_file(each).write_text(golden(each))
