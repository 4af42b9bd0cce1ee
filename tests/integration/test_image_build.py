"""The steps of the Dockerfile, run without Docker: in a folder for a root, with nothing writable but /tmp."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image import instructions
from tests.processes import ROOT, free_ports, wait_for, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 60
PLACES = ("/opt/kvway", "/src", "/tmp")
# Root is not held back by read-only modes; without capabilities it is.
POWERLESS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


class Image:
    """What the Dockerfile makes, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        build, final = instructions()
        for place in PLACES:
            self.at(place).mkdir(parents=True)
        (root / "python").symlink_to(getattr(sys, "_base_executable", sys.executable))
        for verb, rest in build:
            if verb == "COPY":
                *sources, _ = rest.split()
                for source in sources:
                    self._copy(ROOT / source)
            elif verb == "RUN":
                path = os.environ | {"PATH": f"{root}:/usr/bin:/bin"}
                subprocess.run(self._here(rest), shell=True, cwd=self.at("/src"), env=path, check=True)
        self.settings = dict(final)
        words = shlex.split(self._here(self.settings["ENV"]))
        self.environment = dict(word.split("=", 1) for word in words)
        subprocess.run(["chmod", "-R", "a-w", self.at("/opt/kvway")], check=True)

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def command(self, *words: str | Path) -> list[str]:
        """Return the entry point with arguments, held to what the modes of files allow."""
        (entry,) = json.loads(self.settings["ENTRYPOINT"])
        program = shutil.which(entry, path=self.environment["PATH"])
        assert program is not None
        return [*POWERLESS, program, *map(str, words)]

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*POWERLESS, *map(str, words)], cwd="/", env=self.environment, capture_output=True, text=True, check=False
        )

    def _here(self, line: str) -> str:
        return re.sub("|".join(PLACES), lambda place: str(self.at(place[0])), line)

    def _copy(self, source: Path) -> None:
        target = self.at("/src") / source.name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    root = tmp_path_factory.mktemp("image")
    yield Image(root)
    subprocess.run(["chmod", "-R", "u+w", root], check=True)


def test_its_files_cannot_be_written(image: Image) -> None:
    assert image.run("touch", image.at("/opt/kvway") / "new").returncode != 0


def test_the_product_imports_from_where_it_cannot_write(image: Image) -> None:
    program = (
        "import pkgutil, importlib, gateway, policies, sim\n"
        "for package in (gateway, policies, sim):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not found.name.endswith('__main__'): importlib.import_module(found.name)\n"
    )
    result = image.run(image.at("/opt/kvway/bin/python"), "-c", program)
    assert result.returncode == 0, result.stderr


def test_chats_of_gpt_oss_are_rendered_in_it(image: Image) -> None:
    program = "from gateway.prompt.harmony import HarmonyRenderer; HarmonyRenderer([])"
    result = image.run(image.at("/opt/kvway/bin/python"), "-c", program)
    assert result.returncode == 0, result.stderr


def test_what_the_chart_calls_besides_is_there(image: Image) -> None:
    for command in (("hf", "download", "--help"), ("kvway", "worker", "--help"), ("locust", "--version")):
        result = image.run(image.at("/opt/kvway/bin") / command[0], *command[1:])
        assert result.returncode == 0, result.stderr


def test_the_gateway_serves_and_ends_when_it_is_told(image: Image, tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    server = {"host": "127.0.0.1", "port": port, "admin_port": admin_port}
    file = write_config(tmp_path, {"server": server})
    process = subprocess.Popen(image.command("serve", "--config", file), cwd="/", env=image.environment)
    try:
        wait_for(f"http://127.0.0.1:{admin_port}/health", process, START_S)
    finally:
        process.terminate()
        assert process.wait(20) == 0
