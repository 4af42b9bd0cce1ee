"""Two real vLLM engines on the CPU, and a gateway in front of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT, free_ports, kvway, running, wait_for, write_config

VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
MODEL = ROOT / "sim" / "data" / "tiny-model"
TEMPLATE = ROOT / "tests" / "data" / "templates" / "qwen3.jinja"
BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
}


@dataclass(frozen=True)
class Engine:
    """A running vLLM."""

    url: str
    events: str
    replay: str


@dataclass(frozen=True)
class Fleet:
    """Engines, and the gateway's two URLs."""

    engines: list[Engine]
    url: str
    admin: str


@pytest.fixture(scope="session")
def engines() -> Iterator[list[Engine]]:
    if not VLLM.exists():
        pytest.skip("no .venv-vllm: `make e2e-vllm` makes it")
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            port, events, replay = free_ports(3)
            publisher = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
                "topic": f"kv@127.0.0.1:{port}@tiny",
            }
            command = [VLLM, "serve", MODEL, "--served-model-name", "tiny", "--load-format", "dummy"]
            command += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)]
            command += ["--max-model-len", "8192", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
            command += ["--enable-scale-out"] if not started else []  # one that renders, and one that only tokenizes
            command += ["--chat-template", str(TEMPLATE), "--trust-request-chat-template"]
            command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publisher)]
            process = stack.enter_context(running(command, **ENVIRONMENT))
            engine = Engine(f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
            started.append((engine, process))
        for engine, process in started:
            wait_for(f"{engine.url}/health", process, 300)
        yield [engine for engine, _ in started]


@pytest.fixture(scope="session")
def fleet(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with gateway(engines, tmp_path_factory.mktemp("gateway")) as running_gateway:
        yield running_gateway


@pytest.fixture(scope="session")
def passing_fleet(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The same engines behind a gateway that passes token ids on."""
    with gateway(engines, tmp_path_factory.mktemp("passing"), {"pass_token_ids": True}) as running_gateway:
        yield running_gateway


@contextlib.contextmanager
def gateway(
    engines: list[Engine], folder: Path, model: Mapping[str, object] | None = None, **sections: object
) -> Iterator[Fleet]:
    """Start a gateway before engines; ``model`` is what it is told of theirs besides, ``sections`` of all else."""
    public, admin = free_ports(2)
    config = {
        "server": {"host": "127.0.0.1", "port": public, "admin_port": admin},
        "workers": [
            {"url": engine.url, "kv_events": {"endpoint": engine.events, "replay_endpoint": engine.replay}}
            for engine in engines
        ],
        "models": {"tiny": {"tokenizer": str(MODEL), "chat_template": str(TEMPLATE), **(model or {})}},
        "prompt": {"chunk_tokens": CHUNK_TOKENS},
        **sections,
    }
    with running(kvway("serve", "--config", write_config(folder, config))) as process:
        wait_for(f"http://127.0.0.1:{public}/ready", process, 30)
        yield Fleet(engines, f"http://127.0.0.1:{public}", f"http://127.0.0.1:{admin}")
