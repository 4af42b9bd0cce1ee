"""What to tell an engine so that it does what kvway needs, by engine."""

from __future__ import annotations

import json
from typing import Literal
from urllib.parse import urlsplit

from gateway.config import KvEventsConfig

Kind = Literal["vllm", "sglang"]
"""The engines whose flags are known; whatever does not look like SGLang is taken for vLLM."""

_EVENTS_PORT = 5557


def kv_events_flag(kind: Kind, events: KvEventsConfig | None = None) -> str:
    """Return the flag that publishes KV events so that ``events`` receives them.

    Args:
        kind: the engine.
        events: the worker's ``kv_events``; None: the usual ports.
    """
    binds = events is None or events.mode == "connect"
    port = _port(events.endpoint if events is not None else "", _EVENTS_PORT)
    replay = events.replay_endpoint if events is not None else None
    settings: dict[str, object] = {"enable_kv_cache_events": True} if kind == "vllm" else {}
    settings |= {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}" if binds else f"tcp://<host of kvway>:{port}",
        "replay_endpoint": f"tcp://*:{_port(replay or '', port + 1)}",
        "topic": events.topic if events is not None else "",
    }
    return f"--kv-events-config '{json.dumps(settings)}'"


def prefix_caching_flag(kind: Kind) -> str:
    """Return what makes an engine keep prefixes."""
    return "leave out --disable-radix-cache" if kind == "sglang" else "--enable-prefix-caching"


def cached_tokens_flag(kind: Kind) -> str:
    """Return what makes an engine report ``usage.prompt_tokens_details.cached_tokens``."""
    return "--enable-cache-report" if kind == "sglang" else "--enable-prompt-tokens-details"


def block_size_flag(kind: Kind, tokens: int) -> str:
    """Return the flag for blocks of ``tokens`` tokens."""
    return f"--page-size {tokens}" if kind == "sglang" else f"--block-size {tokens}"


def _port(endpoint: str, default: int) -> int:
    port = urlsplit(endpoint).netloc.rpartition(":")[2]
    return int(port) if port.isdecimal() else default
