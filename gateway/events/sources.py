"""Where an engine publishes its KV events, as the engine itself says it over HTTP.

vLLM answers ``GET /kv_event_sources`` with ``{rank: {endpoint, replay_endpoint, topic, …}}``. SGLang's
``GET /server_info`` has ``kv_events: {endpoint_host, endpoint_port_base, replay_endpoint_port_base, topic, dp_size}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

_PORTS: Final = 1 << 16


class EventSource(NamedTuple):
    """The sockets of one data-parallel rank.

    Attributes:
        rank: which.
        endpoint: of the publisher, reachable from outside: the host is the worker's where the engine listens on all.
        replay_endpoint: likewise; None for no replay.
        topic: first frame of what it publishes.
        binds: whether the publisher binds; otherwise it connects to ``endpoint``, where somebody must be bound.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str
    binds: bool


def parse_vllm_sources(body: bytes, host: str) -> list[EventSource]:
    """Read vLLM's ``/kv_event_sources``.

    Args:
        body: the answer; an empty object: the engine publishes no events.
        host: the worker's host.

    Raises:
        ValueError: it is something else.
    """
    sources = []
    for rank, source in _object(msgspec.json.decode(body)).items():
        match source:
            case {"endpoint": str(endpoint)} if rank.isdecimal():
                replay = source.get("replay_endpoint")
                topic = str(source.get("topic") or "")
                replay = _reachable(replay, host) if isinstance(replay, str) else None
                sources.append(EventSource(int(rank), _reachable(endpoint, host), replay, topic, _binds(endpoint)))
            case _:
                raise ValueError(f"rank {rank!r} has no endpoint")
    return sorted(sources)


def parse_sglang_sources(body: bytes, host: str) -> list[EventSource]:
    """Read ``kv_events`` out of SGLang's ``/server_info``; arguments and errors as for vLLM's."""
    info = _object(msgspec.json.decode(body)).get("kv_events")
    match info:
        case None:
            return []
        case {"endpoint_port_base": int(port)}:
            replay_port, ranks = info.get("replay_endpoint_port_base"), info.get("dp_size") or 1
            if not isinstance(ranks, int) or port + ranks > _PORTS:
                raise ValueError(f"kv_events has no ports for {ranks!r} ranks")
            topic, own_host = str(info.get("topic") or ""), info.get("endpoint_host") or "*"
            host = host if own_host in ("*", "0.0.0.0", "::", "[::]") else str(own_host)  # noqa: S104 - compared
            host = f"[{host}]" if ":" in host and not host.startswith("[") else host
            return [
                EventSource(
                    rank,
                    f"tcp://{host}:{port + rank}",
                    f"tcp://{host}:{replay_port + rank}" if isinstance(replay_port, int) else None,
                    topic,
                    binds=True,
                )
                for rank in range(ranks)
            ]
        case _:
            raise ValueError("kv_events has no endpoint_port_base")


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _binds(endpoint: str) -> bool:
    """Whether vLLM's publisher binds: where the endpoint stands for all interfaces, or for a file."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _reachable(endpoint: str, host: str) -> str:
    scheme, separator, address = endpoint.partition("://")
    for everywhere in ("*", "0.0.0.0", "[::]", "::"):  # noqa: S104 - replaced, not listened on
        if address.startswith(f"{everywhere}:"):
            return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{address.removeprefix(everywhere)}"
    return endpoint
