"""The API keys of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Config, load_config
from gateway.config_workers import WorkerConfig
from gateway.errors import ConfigError
from gateway.fleet.credentials import credentials


def worker(path: Path | None) -> WorkerConfig:
    return WorkerConfig(url="http://w:1", api_key_file=path)


def test_a_key_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(" secret\n")
    assert credentials(worker(path)) == {"authorization": "Bearer secret"}
    path.write_text("another")
    assert credentials(worker(path)) == {"authorization": "Bearer another"}


def test_without_a_key_nothing_is_sent(tmp_path: Path) -> None:
    assert credentials(worker(None)) == {}
    assert credentials(worker(tmp_path / "absent")) == {}


@pytest.mark.parametrize("text", ["", "two\nlines", "a\r\nx-evil: 1", "schlüssel"])
def test_what_is_no_key_never_gets_into_a_header(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text, "utf-8")
    assert credentials(worker(path)) == {}


def test_a_file_that_does_not_exist_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kvway.yaml"
    path.write_text("workers: [{url: 'http://w:1', api_key_file: /no/such/key}]")
    with pytest.raises(ConfigError, match=r"workers\[0\].api_key_file: /no/such/key does not exist"):
        load_config(path, {})


def test_the_key_itself_is_in_no_configuration_that_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    config = Config(workers=(worker(path),))
    assert "secret" not in str(config.masked())
