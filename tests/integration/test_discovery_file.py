"""Workers from a file that operators and ConfigMaps change."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config_workers import DiscoveryConfig, WorkerConfig
from gateway.errors import ConfigError
from gateway.fleet.discovery.discovery import Discovery
from gateway.fleet.discovery.file import read_workers
from gateway.fleet.registry import Registry, Worker
from tests.integration.engine import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "workers.yaml"
    write(path, "a")
    return path


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def discovery(path: Path, registry: Registry) -> AsyncIterator[Discovery]:
    config = DiscoveryConfig.model_validate({"files": [{"path": path, "interval_s": 0.02}]})
    discovery = Discovery(config, registry)
    await discovery.start()
    yield discovery
    await discovery.close()


def write(path: Path, *names: str, **fields: Any) -> None:
    entries = [{"name": name, "url": f"http://{name}:8000"} | fields for name in names]
    path.write_text(yaml.safe_dump({"workers": entries}))


def test_json_is_yaml(path: Path) -> None:
    path.write_text('{"workers": [{"url": "http://10.0.0.1:8000"}]}')
    assert [worker.url for worker in read_workers(path).workers] == ["http://10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("workers: [", r"is not valid YAML"),
        ("workers: [{url: 'ftp://x'}]", r"workers\[0\]\.url: 'ftp://x' is not a worker URL"),
        ("workers: [{url: 'http://x:1', modls: [a]}]", r"unknown key 'workers\[0\]\.modls'; did you mean 'models'\?"),
        ("workers: [{url: 'http://x:1'}, {url: 'http://x:1'}]", r"two workers are called 'x:1'"),
        ("", r"workers: is required"),
    ],
)
def test_a_mistake_is_named_like_one_in_the_configuration(path: Path, content: str, complaint: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_workers(path)


async def test_workers_follow_the_file_and_those_unchanged_stay(
    path: Path, registry: Registry, discovery: Discovery
) -> None:
    await until(lambda: set(registry.workers) == {"a"})
    worker = registry.workers["a"]
    write(path, "a", "b")
    await until(lambda: set(registry.workers) == {"a", "b"})
    assert registry.workers["a"] is worker
    write(path, "b")
    await until(lambda: set(registry.workers) == {"b"})


async def test_a_changed_entry_is_another_worker(path: Path, registry: Registry, discovery: Discovery) -> None:
    await until(lambda: "a" in registry.workers)
    before = registry.workers["a"]
    write(path, "a", models=["llama"])
    await until(lambda: registry.workers.get("a") is not before and "a" in registry.workers)
    assert registry.workers["a"].models == {"llama": "llama"}


async def test_content_that_is_not_valid_keeps_the_old_set_and_is_told(
    path: Path, registry: Registry, discovery: Discovery
) -> None:
    await until(lambda: "a" in registry.workers)
    (source,) = discovery.reporters
    path.write_text("workers: [{url: 'http://b:8000', modls: [x]}]")
    await until(lambda: "modls" in source.problem)
    path.unlink()
    await until(lambda: "No such file" in source.problem)
    assert set(registry.workers) == {"a"}
    write(path, "c")
    await until(lambda: set(registry.workers) == {"c"})
    assert source.problem == ""


async def test_a_file_that_does_not_change_is_looked_at_and_may_come_back(
    path: Path, registry: Registry, discovery: Discovery
) -> None:
    await until(lambda: "a" in registry.workers)
    worker = registry.workers["a"]
    (source,) = discovery.reporters
    first = source.succeeded_at
    await until(lambda: source.succeeded_at > first)
    aside = path.rename(path.with_suffix(".aside"))
    await until(lambda: "No such file" in source.problem)
    aside.rename(path)
    await until(lambda: not source.problem)
    assert registry.workers["a"] is worker


async def test_a_swapped_symbolic_link_is_seen_though_the_file_behind_is_as_old_and_as_long(tmp_path: Path) -> None:
    """This is how the kubelet updates a mounted ConfigMap."""
    for folder, name in (("..1", "a"), ("..2", "b")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "workers.yaml", name)
        os.utime(tmp_path / folder / "workers.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "workers.yaml"
    path.symlink_to("..data/workers.yaml")
    registry = Registry()
    discovery = Discovery(DiscoveryConfig.model_validate({"files": [{"path": path, "interval_s": 0.02}]}), registry)
    await discovery.start()
    await until(lambda: set(registry.workers) == {"a"})
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    await until(lambda: set(registry.workers) == {"b"})
    await discovery.close()


async def test_a_worker_that_is_listed_for_a_while_takes_the_place_of_one_that_is_found(
    registry: Registry, discovery: Discovery
) -> None:
    (source,) = discovery.reporters
    await until(lambda: set(registry.workers) == {"a"})
    listed = Worker.from_config(WorkerConfig(url="http://elsewhere:1", name="a"))
    registry.add(listed)
    first = source.succeeded_at
    await until(lambda: source.succeeded_at > first)
    assert registry.workers["a"] is listed
    registry.remove("a")
    await until(lambda: "a" in registry.workers)
    assert registry.workers["a"].host == "a"


async def test_listed_workers_and_first_sources_win(tmp_path: Path) -> None:
    registry = Registry()
    listed = Worker.from_config(WorkerConfig(url="http://a:8000", name="listed"))
    registry.add(listed)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    write(first, "a", "b")
    second.write_text("workers: [{url: 'http://other:1', name: b}, {url: 'http://c:8000'}]")
    files = [{"path": each, "interval_s": 0.02} for each in (first, second)]
    discovery = Discovery(DiscoveryConfig.model_validate({"files": files}), registry)
    await discovery.start()
    await until(lambda: all(source.succeeded_at for source in discovery.reporters))
    assert set(registry.workers) == {"listed", "b", "c:8000"}  # a is the engine of the listed one
    write(first)
    await until(lambda: set(registry.workers) == {"listed", "b", "c:8000"} and registry.workers["b"].port == 1)
    assert registry.workers["listed"] is listed
    await discovery.close()
