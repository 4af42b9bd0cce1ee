"""Tokenizer files by the name of a repository: from a hub, from the cache of an earlier day, or from nowhere.

The hub's client reads its environment once, so each test is a process of its own: ``kvway serve --check``.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.processes import kvway, write_config
from tests.prompt_rig import TINY

COMMIT = "a" * 40
FILES = {file.name: file.read_bytes() for file in TINY.iterdir()} | {"model.safetensors": b"weights"}


class Hub(BaseHTTPRequestHandler):
    """The little of the hub's API that a download needs, with one repository, ``acme/tiny``."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        file = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/acme/tiny/revision/"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif self.path.startswith("/api/models/acme/tiny/tree/"):
            entries = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": name} for name in FILES]
            self._answer(json.dumps(entries).encode())
        elif self.path.startswith(f"/acme/tiny/resolve/{COMMIT}/") and file in FILES:
            self._answer(FILES[file], {"etag": f'"{file}"', "x-repo-commit": COMMIT})
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815 - as the base class wants it

    def _answer(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in ({"content-length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Hub.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def check(folder: Path, repository: str, **environment: str) -> subprocess.CompletedProcess[str]:
    config = write_config(folder, {"models": {"*": {"hub": repository}}})
    home = {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "PATH": "/usr/bin"}
    command = kvway("serve", "--check", "--config", config)
    return subprocess.run(command, capture_output=True, text=True, env=home | environment, timeout=50)


@pytest.mark.slow
def test_files_come_from_the_hub_and_then_from_the_cache(hub: str, tmp_path: Path) -> None:
    fetched = check(tmp_path, "acme/tiny", HF_ENDPOINT=hub)
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    assert not any("safetensors" in path for path in Hub.asked)  # nobody needs the weights

    for without_network in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        cached = check(tmp_path, "acme/tiny", **without_network)
        assert cached.returncode == 0, cached.stdout + cached.stderr


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
def test_what_is_nowhere_is_named_and_what_to_do(offline: bool, tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    failed = check(tmp_path, "acme/tiny@v2", **environment)
    assert failed.returncode == 2
    said = " ".join((failed.stdout + failed.stderr).split())
    assert "acme/tiny@v2: neither the Hugging Face hub nor its cache" in said
    assert "models.<name>.tokenizer" in said
    assert "Traceback" not in said
