"""Two real vLLM engines, one that prefills and one that decodes, over NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import BLOCK_TOKENS, ENVIRONMENT, MODEL, VLLM
from tests.processes import free_ports, kvway, running, wait_for, write_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}
NIXL = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": "tcp,shm,self", "UCX_NET_DEVICES": "lo"}
BYTES = "vllm:nixl_bytes_transferred_sum"
PATHS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Pair:
    """A gateway before a prefill and a decode engine."""

    url: str
    admin: str
    prefill: str
    decode: str
    prefill_process: subprocess.Popen[bytes]
    decode_process: subprocess.Popen[bytes]


def engine(port: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Start an engine of either role."""
    command: list[str | Path] = [VLLM, "serve", MODEL, "--served-model-name", "tiny", "--load-format", "dummy"]
    command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)]
    command += ["--max-model-len", "8192", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(CONNECTOR)]
    (side_channel,) = free_ports(1)
    return running(command, **ENVIRONMENT | NIXL | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not VLLM.exists() or not list(VLLM.parent.parent.glob("lib/python3*/site-packages/nixl")):
        pytest.skip("no .venv-vllm with nixl: `make e2e-vllm-pd` makes it")
    with contextlib.ExitStack() as stack:
        ports = free_ports(2)
        prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
        processes = [stack.enter_context(engine(port)) for port in ports]
        for url, process in zip((prefill, decode), processes, strict=True):
            wait_for(f"{url}/health", process, 300)
        public, admin = free_ports(2)
        config = {
            "server": {"host": "127.0.0.1", "port": public, "admin_port": admin},
            "workers": [{"url": prefill, "role": "prefill"}, {"url": decode, "role": "decode"}],
            "models": {"tiny": {"tokenizer": str(MODEL)}},
            "prompt": {"chunk_tokens": 64},
            "disaggregation": {"policy": "always", "pull_back_s": 400},
        }
        file = write_config(tmp_path_factory.mktemp("gateway"), config)
        gateway = stack.enter_context(running(kvway("serve", "--config", file)))
        wait_for(f"http://127.0.0.1:{public}/ready", gateway, 30)
        yield Pair(f"http://127.0.0.1:{public}", f"http://127.0.0.1:{admin}", prefill, decode, *processes)


def ask(url: str, path: str, text: str, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    body |= {"prompt": text} if path == PATHS[1] else {"messages": [{"role": "user", "content": text}]}
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def kill_tree(pid: int) -> None:
    """Kill an engine with all processes that it has started, which would outlive it."""
    children = " ".join(task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")).split()
    os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(int(child))


def figure(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def text_of(response: httpx.Response) -> str:
    choice = response.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", PATHS)
def test_answers_equal_those_of_one_engine_and_kv_is_moved(pair: Pair, path: str) -> None:
    prompt = f"{path} begins a long story about a router. " * 40
    moved = figure(pair.decode, BYTES)
    apart = ask(pair.url, path, prompt)
    assert figure(pair.decode, BYTES) > moved
    whole = ask(pair.prefill, path, prompt)
    assert text_of(apart) == text_of(whole)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [apart.json()["usage"][name] for name in counts] == [whole.json()["usage"][name] for name in counts]
    assert apart.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", PATHS)
def test_streams_begin_and_end_as_ever(pair: Pair, path: str) -> None:
    prompt = f"{path} streams a long story about a router. " * 40
    moved = figure(pair.decode, BYTES)
    stream = ask(pair.url, path, prompt, stream=True)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert figure(pair.decode, BYTES) > moved


def test_what_the_prefill_engine_had_cached_is_reported(pair: Pair) -> None:
    prompt = "the same long story about a router, told twice. " * 40
    first, second = (ask(pair.url, PATHS[1], prompt) for _ in range(2))
    cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] == 0 < cached[1]
    assert figure(pair.admin, "kvway_handovers_total") >= 2


def test_the_prefill_engine_pulls_what_the_decode_engine_keeps_of_the_turn_before(pair: Pair) -> None:
    turn = "a story of two turns, the first of which is long enough to be worth moving. " * 40
    turn += text_of(ask(pair.url, PATHS[1], turn)) + " And then?" * 20
    assert httpx.post(f"{pair.prefill}/reset_prefix_cache", timeout=10).status_code == 200
    moved = figure(pair.prefill, BYTES)
    second = ask(pair.url, PATHS[1], turn)
    assert figure(pair.prefill, BYTES) > moved
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert text_of(second) == text_of(ask(pair.decode, PATHS[1], turn))


def kill_with_requests_under_way(pair: Pair, url: str, process: subprocess.Popen[bytes]) -> None:
    """Kill an engine that has answers to finish: these, and whatever is asked next, come all the same."""
    prompts = [f"{url} {number} the last story about a router. " * 40 for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        # Not streamed, so that nothing of them has reached the client.
        asked = [threads.submit(ask, pair.url, PATHS[n % 2], prompts[n], max_tokens=200) for n in range(4)]
        while not figure(url, "vllm:num_requests_running") and not any(one.done() for one in asked):
            time.sleep(0.01)
        kill_tree(process.pid)
        for one in asked:
            assert one.result().json()["usage"]["completion_tokens"] == 200
    for number in range(4, 8):
        ask(pair.url, PATHS[number % 2], prompts[number], stream=number > 5)


def test_a_killed_engine_fails_no_request(pair: Pair) -> None:
    kill_with_requests_under_way(pair, pair.decode, pair.decode_process)
    with engine(int(pair.decode.rpartition(":")[2])) as process:
        wait_for(f"{pair.decode}/health", process, 300)
        handed_over = figure(pair.admin, "kvway_handovers_total")
        while figure(pair.admin, "kvway_handovers_total") == handed_over:  # until the gateway has found it again
            ask(pair.url, PATHS[1], f"{time.monotonic()} the story in between. " * 40)
        kill_with_requests_under_way(pair, pair.prefill, pair.prefill_process)
