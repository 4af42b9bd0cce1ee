"""``kvway load`` and its locustfile as processes, against a scripted server and against a simulated worker."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from sim.scenario import Traffic
from tests.events_rig import until
from tests.processes import ROOT, kvway
from tests.sim_clients import worker_and_client

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
PAUSE_S = 0.4

Script = Sequence[bytes | float]


def event(data: object) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    line = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


def token(text: str) -> bytes:
    return event({"choices": [{"delta": {"content": text}}]})


def usage(prompt: int, output: int, cached: int | None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event({"choices": [], "usage": counts})


@dataclass
class Scripted:
    """A server that gives every connection the next script, and remembers the requests."""

    port: int
    requests: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def scripted(*scripts: Script) -> Iterator[Scripted]:
    """Serve the scripts, each bytes to send and seconds to pause, on connections that close at their ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Scripted(listener.getsockname()[1])

        def serve() -> None:
            for script in scripts:
                connection, _ = listener.accept()
                with connection:
                    server.requests.append(_request(connection))
                    for part in script:
                        if isinstance(part, float):
                            time.sleep(part)
                        else:
                            connection.sendall(part)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server
        thread.join(10)
        assert not thread.is_alive(), "fewer requests came than there are scripts"


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    [length] = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < int(length):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


async def run(*command: object, **environ: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=-1, stderr=-1, cwd=ROOT, env=os.environ | environ
    )
    out, err = await asyncio.wait_for(process.communicate(), 50)
    return process.returncode, out.decode(), err.decode()


def rows(file: Path) -> list[dict[str, float | None]]:
    with file.open() as lines:
        return [{key: float(cell) if cell else None for key, cell in row.items()} for row in csv.DictReader(lines)]


@pytest.mark.slow
async def test_a_stream_is_timed_as_its_parts_arrive_and_what_is_wrong_with_one_is_said(tmp_path: Path) -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    done = event("[DONE]")
    whole = [HEAD, role, PAUSE_S, token("a"), PAUSE_S, token("b"), token("c"), usage(100, 3, 80), done, END]
    cut = [HEAD, token("a")]
    undone = [HEAD, token("a"), END]
    refused = [b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 7\r\nconnection: close\r\n\r\n{"a":1}']
    failing = [HEAD, token("a"), event({"error": {"message": "out of memory"}}), done, END]
    tokenless = [HEAD, role, done, END]
    closed: Script = []
    scripts = [whole, cut, undone, refused, failing, tokenless, closed]
    with scripted(*scripts) as server:
        code, out, err = await run(
            *kvway("load", f"tenants:requests={len(scripts)}", "--loop", "closed", "--users", 1, "--model", "m"),
            *("--url", f"http://127.0.0.1:{server.port}/v1", "--csv", tmp_path / "rows.csv", "--json", "--ignore-eos"),
            OPENAI_API_KEY="secret\n",  # as it is in a Secret made of a file
        )
    assert code == 1, err
    found = json.loads(out)
    first, *others = rows(tmp_path / "rows.csv")
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"], first["ok"]) == (100, 80, 3, 1)
    ttft_s, latency_s = first["ttft_s"], first["latency_s"]
    assert ttft_s is not None and latency_s is not None
    # Not the role's event, but not the end either: between the first token and that, the server pauses.
    assert ttft_s >= PAUSE_S
    assert latency_s - ttft_s >= PAUSE_S / 2
    assert found["itl_p99_s"] >= PAUSE_S / 2
    assert found["itl_p50_s"] < found["itl_p99_s"]
    assert (found["requests"], found["failed"], found["hit_rate"]) == (7, 6, 0.8)
    assert [row["ok"] for row in others] == [0.0] * 6
    for problem in ("broke off", r"without [DONE]", "status 429", "out of memory", "no token", "no answer"):
        assert any(problem in message for message in found["errors"]), (problem, found["errors"])
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions ")
    assert b"authorization: bearer secret\r\n" in head.lower() + b"\r\n"
    sent = json.loads(body)
    assert sent["stream_options"] == {"include_usage": True}
    assert (sent["model"], sent["ignore_eos"]) == ("m", True)
    assert "secret" not in out + err


@pytest.mark.slow
async def test_a_scenario_runs_against_a_worker_and_is_reported(tmp_path: Path) -> None:
    html, figures, lines = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "r.csv"
    async with worker_and_client() as (worker, _):
        code, out, err = await run(
            *kvway("load", "chat:sessions=6,turns=3,think_s=0.1", "--users", 3, "--url", worker.url, "--api", "chat"),
            *("--report", html, "--save", figures, "--csv", lines, "--json"),
        )
        assert code == 0, err
        expected = len(Traffic("chat:sessions=6,turns=3").trace(0).requests)
        found = json.loads(out)
        assert (found["answered"], found["failed"], found["model"]) == (expected, 0, "tiny")
        assert found["hit_rate"] > 0.5
        assert len(rows(lines)) == expected
        assert json.loads(figures.read_text()) == found
    page = html.read_text()
    assert page.count("<svg") == 5
    assert "src=" not in page
    assert 'href="http' not in page.replace("www.w3.org", "")
    assert sorted(tmp_path.iterdir()) == sorted([lines, html, figures])


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
async def test_a_test_that_is_ended_reports_what_there_is(end: signal.Signals, tmp_path: Path) -> None:
    async with worker_and_client() as (worker, client):
        words = ("load", "chat:sessions=10000,think_s=0.05", "--users", "2", "--url", worker.url)
        file = tmp_path / "r.json"
        process = await asyncio.create_subprocess_exec(*map(str, kvway(*words, "--save", str(file))), stdout=-3)

        async def has_answered() -> bool:
            served = (await client.get("/metrics")).text
            return re.search(r'finished_reason="length"\S* [1-9]', served) is not None

        await until(has_answered, within_s=30)
        process.send_signal(end)
        assert await asyncio.wait_for(process.wait(), 50) == 0
    found = json.loads(file.read_text())
    assert found["answered"] > 0 == found["failed"]


@pytest.mark.slow
async def test_requests_that_are_not_answered_in_the_end_have_failed() -> None:
    program = """
import json, sys
from sim.load.scenario import read_scenario
scenario = read_scenario("tenants:requests=2", loop="closed")
from sim.load.headless import LoadOptions, run_load
options = LoadOptions(sys.argv[1], "two", users=2, model="m", duration_s=0.5, drain_s=0.2)
print(json.dumps(run_load(options, scenario, lambda *_: None).summary))
"""
    started: Script = [HEAD, token("a"), 3.0]
    after_that: Script = []
    with scripted(started, after_that) as server:
        code, out, err = await run(sys.executable, "-c", program, f"http://127.0.0.1:{server.port}")
    assert code == 0, err
    found = json.loads(out)
    assert (found["answered"], found["failed"]) == (0, 2)
    assert found["errors"] == {"not answered within 0.2 s after the end of the test": 2}


async def test_models_are_shown_as_they_are_called_and_what_is_not_reported_is_not_zero() -> None:
    with scripted([HEAD, token("a"), token("b"), event("[DONE]"), END]) as server:
        words = ("--model", "[/models/tiny]", "--url", f"http://me:hidden@127.0.0.1:{server.port}")
        code, out, err = await run(*kvway("load", "tenants:requests=1", *words))
    assert code == 0, err
    assert "[/models/tiny]" in out
    assert re.search(r"output tokens/s\W+not reported", out)
    assert "hidden" not in out + err


@pytest.mark.slow
async def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    traffic = "tenants:requests=12,rate=50,output_tokens=100"
    async with worker_and_client(speed=2.0) as (worker, _):
        words = ("--users", "12", "--api", "completions", "--csv", tmp_path / "r.csv", "--json", "--url", worker.url)
        code, out, err = await run(*kvway("load", traffic, *words))
    assert code == 0, err
    sent = sorted(row["sent_s"] or 0.0 for row in rows(tmp_path / "r.csv"))
    due = [request.arrival_s for request in Traffic(traffic).trace(0).requests]
    assert all(at >= due_s - 0.01 for at, due_s in zip(sent, due, strict=True))
    assert sent[-1] < json.loads(out)["latency_p50_s"] * len(due)


@pytest.mark.slow
async def test_what_is_due_at_once_is_sent_at_once_by_however_many_users() -> None:
    async with worker_and_client(speed=100) as (worker, _):
        words = ("--users", 250, "--duration", 2, "--json", "--url", worker.url)
        code, out, err = await run(*kvway("load", "bursts:bursts=1,copies=250,prompt_tokens=16", *map(str, words)))
    assert code == 0, err
    assert json.loads(out)["answered"] == 250


@pytest.mark.slow
async def test_a_ramp_ends_with_its_last_step() -> None:
    async with worker_and_client() as (worker, _):
        words = ("--ramp", "--ramp-step", 1, "--ramp-most", 2, "--url", worker.url, "--json")
        # Whose loop is open where none is said: then no number of users would send more.
        code, out, err = await run(*kvway("load", "tenants:requests=5000,rate=1", *map(str, words)))
    assert code == 0, err
    found = json.loads(out)
    assert found["saturated"] is False  # it ended at --ramp-most
    steps = found["ramp"]
    assert [step["users"] for step in steps] == [1, 2]
    assert all(step["requests_per_s"] > 2 for step in steps)


@pytest.mark.slow
async def test_locust_divides_a_scenario_between_its_processes(tmp_path: Path) -> None:
    locustfile = CliRunner().invoke(app, ["load", "--locustfile"]).stdout.strip()
    async with worker_and_client() as (worker, client):
        locust = (sys.executable, "-m", "locust", "-f", locustfile, "--headless", "--processes", 2, "-u", 4, "-r", 4)
        options = ("--scenario", "tenants:requests=16", "--loop", "closed", "-t", "8s", "--host", worker.url)
        code, _, err = await run(*locust, *options, "--json-file", tmp_path / "stats")
        assert code == 0, err
        served = (await client.get("/metrics")).text
    entries: dict[str, Any] = {each["name"]: each for each in json.loads((tmp_path / "stats.json").read_text())}
    assert {"TTFT", "ITL", "tokens/s", "cached %"} <= entries.keys()
    assert entries["/v1/chat/completions"]["num_requests"] == entries["TTFT"]["num_requests"] == 16
    assert 'finished_reason="length",model_name="tiny"} 16.0' in served


@pytest.mark.slow
async def test_a_worker_of_locust_gives_signs_of_life_while_it_reads_a_scenario() -> None:
    program = """
import gevent
from argparse import Namespace
from gevent.monkey import get_original
from locust.env import Environment
from sim.load import session
from sim.load.users import LoadUser
long = get_original("_thread", "allocate_lock")()
long.acquire()
session._scenario = lambda *_: Namespace(units=[], ended=long.acquire(True, 10))
gevent.spawn(long.release)
options = Namespace(model="m", api_key_env="NONE", ignore_eos=False)
session.LoadSession(Environment(host="http://127.0.0.1:1", parsed_options=options)).prepare()
print(LoadUser.schedule.scenario.ended)
"""
    assert await run(sys.executable, "-c", program) == (0, "True\n", "")


@pytest.mark.slow
async def test_locust_ramps_in_a_closed_loop_only() -> None:
    files = ",".join(str(ROOT / "sim" / "load" / name) for name in ("locustfile.py", "ramp.py"))
    locust = (sys.executable, "-m", "locust", "-f", files, "--headless", "--host", "http://127.0.0.1:1")
    code, _, err = await run(*locust, "--scenario", "rag", "--loop", "open")
    assert code == 2
    assert "leave out --loop open" in err


@pytest.mark.slow
async def test_locust_ends_where_there_is_no_such_scenario() -> None:
    locust = (sys.executable, "-m", "locust", "-f", ROOT / "sim" / "load" / "locustfile.py", "--headless")
    code, _, err = await run(*locust, "--host", "http://127.0.0.1:1", "--scenario", "chta")
    assert code == 2
    assert "Did you mean 'chat'" in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("chta",), "Did you mean 'chat'"),
        (("--url", "127.0.0.1:8000"), "no URL"),
        (("--loop", "round"), "closed, sessions, open"),
        (("--ramp", "--loop", "open"), "leave out --loop open"),
        (("--save", "missing/r.json"), "does not exist"),
    ],
)
def test_what_cannot_run_is_one_message_and_exit_code_2(words: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(app, ["load", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


async def test_an_endpoint_that_is_not_there_is_one_message_and_no_file(tmp_path: Path) -> None:
    code, out, err = await run(*kvway("load", "--url", "http://127.0.0.1:1", "--save", tmp_path / "r.json"))
    assert (code, out) == (2, "")
    assert err.startswith("kvway load: no endpoint answers at http://127.0.0.1:1")
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_without_locust_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "locust", None)
    result = CliRunner().invoke(app, ["load"])
    assert result.exit_code == 2
    assert "pip install 'kvway[load]'" in result.stderr
