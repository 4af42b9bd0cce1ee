"""What can be said about the image without building it."""

from __future__ import annotations

import re
import tomllib

from tests.chart import SIMULATED, pod, render
from tests.image import instructions
from tests.processes import ROOT


def test_all_that_is_copied_is_in_the_build_context_and_nothing_else():
    copied = {word for stage in instructions() for verb, line in stage if verb == "COPY" for word in line.split()[:-1]}
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert copied - {"--from=build", "/opt/kvway"} == kept
    assert (ROOT / ".dockerignore").read_text().startswith("*\n")


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (re.search(r"'\.\[(.+)\]'", line) for _, line in instructions()[0] if "pip install" in line)
    wanted = list(project["dependencies"])
    for extra in extras[1].split(","):
        wanted += project["optional-dependencies"][extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name.partition("==")[0] for name in lines if "==" in name}
    missing = {re.split(r"[^\w.-]", each)[0] for each in wanted} - pinned
    assert not missing, f"run: {lines[1].lstrip('# ')}"


def test_images_it_is_built_from_are_pinned_and_have_no_host():
    for _, line in (stage[0] for stage in instructions()):
        assert re.fullmatch(r"[a-z]+:\d+\.\d+\.\d+-[a-z-]+( AS build)?", line)


def test_it_runs_the_gateway_where_the_chart_mounts_its_configuration_and_not_as_root():
    final = dict(instructions()[-1])
    container = pod(render(SIMULATED))["containers"][0]
    assert final["CMD"] == '["serve", "--config", "/etc/kvway/kvway.yaml"]'
    assert container["args"] == ["serve", "--config", container["volumeMounts"][0]["mountPath"]]
    assert int(final["USER"].partition(":")[0]) > 0
    assert set(final["EXPOSE"].split()) == {str(each["containerPort"]) for each in container["ports"]}
