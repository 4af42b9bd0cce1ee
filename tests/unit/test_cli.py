"""The command line says what is wrong in one message, without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gateway.admin.explain import print_explanation
from gateway.cli import app
from tests.processes import ROOT

TINY = ROOT / "sim" / "data" / "tiny-model"


def kvway(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@contextmanager
def answering(status: int, body: Any) -> Iterator[str]:
    """Run an HTTP server that answers everything with the same; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(404 if self.path.startswith("//") else status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_admin_address_may_end_with_a_slash() -> None:
    with answering(501, {"error": {"message": "Engines cannot pin."}}) as url:
        assert kvway("cache", "pin", "--text", "a", "--admin", f"{url}/").exit_code == 3


@pytest.fixture
def stranger() -> Iterator[str]:
    """An HTTP server that is no gateway."""
    with answering(404, {"detail": "Not Found"}) as url:
        yield url


def test_check_accepts_a_usable_configuration(tmp_path: Path) -> None:
    file = tmp_path / "kvway.yaml"
    file.write_text(f"models: {{'*': {{tokenizer: '{TINY}'}}}}")
    result = kvway("serve", "--config", file, "--check")
    assert (result.exit_code, result.output) == (0, "configuration is valid\n")


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"a": 1}'])
def test_check_refuses_a_tokenizer_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    file = tmp_path / "kvway.yaml"
    file.write_text(f"models: {{'*': {{tokenizer: '{tmp_path}'}}}}")
    result = kvway("serve", "--config", file, "--check")
    assert result.exit_code == 2
    assert "tokenizer" in result.output


def test_check_refuses_a_chat_template_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for %}")
    file = tmp_path / "kvway.yaml"
    file.write_text(f"models: {{'*': {{tokenizer: '{TINY}', chat_template: '{tmp_path}/broken.jinja'}}}}")
    result = kvway("serve", "--config", file, "--check")
    assert result.exit_code == 2
    assert "template" in result.output


def test_an_unusable_certificate_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "kvway.yaml"
    file.write_text(f"server: {{port: 0, admin_port: 0, host: 127.0.0.1, tls_cert: '{file}', tls_key: '{file}'}}")
    result = kvway("serve", "--config", file)
    assert result.exit_code == 2
    assert "not a usable certificate" in result.output


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "[::1]"])
def test_a_host_that_nobody_can_listen_on_ends_the_start(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWAY_SERVER", f"{{host: '{host}', port: 0, admin_port: 0}}")
    result = kvway("serve")
    assert result.exit_code == 2
    assert result.output.startswith(f"kvway: cannot listen on {host}:0: ")


@pytest.mark.parametrize("admin", ["http://127.0.0.1:1", "http://a..b", "nowhere"])
def test_explain_and_cache_say_when_nothing_answers(tmp_path: Path, admin: str) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"prompt": "Once"}')
    for command in (["explain"], ["cache", "lookup"]):
        result = kvway(*command, file, "--admin", admin)
        assert result.exit_code == 2
        assert f"no gateway answers at {admin}" in result.output


def test_explain_says_when_a_stranger_answers(tmp_path: Path, stranger: str) -> None:
    file = tmp_path / "request.json"
    file.write_text("{}")
    result = kvway("explain", file, "--admin", stranger)
    assert result.exit_code == 2
    assert "is no admin port of kvway" in result.output


def test_explain_says_when_the_request_cannot_be_read(tmp_path: Path) -> None:
    result = kvway("explain", tmp_path / "nowhere.json")
    assert result.exit_code == 2
    assert "nowhere.json" in result.output


def test_an_explanation_can_be_read_at_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [
        {"worker": f"10.0.0.{number}:8000", "chosen": number == 3, "cost": 0.1 * number, "hit_tokens": 512, "pi": 0.0}
        for number in range(1, 7)
    ]
    explanation = {
        "worker": "10.0.0.3:8000",
        "policy": "expected-cost",
        "reason": "hit",
        "expected_hit_tokens": 512,
        "prompt_tokens": 700,
        "predicted_ttft_s": 0.25,
        "prefill": {"pieces": 3, "why_whole": ""},
        "candidates": candidates,
    }
    print_explanation(explanation, Console(width=80))
    printed = capsys.readouterr().out
    assert "in 3 pieces" in printed
    assert "→ 10.0.0.3:8000" in printed
    assert "10.0.0.1:8000" in printed
    assert "hit_tokens" in printed
    assert "│ pi " not in printed  # nothing to say of it
    assert "2 more candidates" in printed


@pytest.mark.parametrize("name", ["[fe80::1]:8000", "[/b]", "[red]"])
def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, name: str) -> None:
    file = tmp_path / "request.json"
    file.write_text("{}")
    held = {"worker": name, "chosen": True, "hit_tokens": 4}
    explanation = {
        "worker": name,
        "policy": "sticky",
        "reason": "hit",
        "expected_hit_tokens": 4,
        "prompt_tokens": 8,
        "predicted_ttft_s": 0.1,
        "prefill": {"pieces": 0, "why_whole": "short"},
        "candidates": [held],
    }
    with answering(200, explanation) as url:
        assert kvway("explain", file, "--admin", url).output.count(name) == 2
    held |= {"hbm_tokens": 4, "host_tokens": 0, "disk_tokens": 0, "remote_tokens": 0}
    found = {
        "model": name,
        "prompt_tokens": 8,
        "chunk_tokens": 4,
        "exact": True,
        "workers": [held],
        "coordinator": None,
    }
    with answering(200, found) as url:
        assert kvway("cache", "lookup", file, "--admin", url).output.count(name) == 2
