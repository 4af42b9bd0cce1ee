"""What an engine says of its own KV events, before it joins."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

import httpx
from pydantic import ValidationError

from gateway.config_workers import KvEventsConfig, WorkerConfig
from gateway.events.sources import EventSource, parse_sglang_sources, parse_vllm_sources
from gateway.fleet.discovery.found import as_rank
from gateway.fleet.polling import FetchFailed, fetch
from gateway.fleet.registry import Worker

log = logging.getLogger("kvway.discovery")

_TIMEOUT_S: Final = 2.0
_PATHS: Final = (("/kv_event_sources", parse_vllm_sources), ("/server_info", parse_sglang_sources))


async def ask_engine(client: httpx.AsyncClient, config: WorkerConfig) -> list[WorkerConfig]:
    """Return the workers that an engine is: one, or one per data-parallel rank where each has events of its own.

    An engine that publishes no KV events, or does not say so in a way known here, is one worker without events.

    Args:
        client: for control calls.
        config: the engine, without events.

    Raises:
        FetchFailed: it does not answer, or not yet.
    """
    ranks = [(rank, config.model_copy(update={"kv_events": events})) for rank, events in await _events(client, config)]
    if len(ranks) < 2:
        return [entry for _, entry in ranks] or [config]
    return [as_rank(entry, rank) for rank, entry in ranks]


async def _events(client: httpx.AsyncClient, config: WorkerConfig) -> list[tuple[int, KvEventsConfig]]:
    worker = Worker.from_config(config)
    for path, read in _PATHS:
        status, body = await fetch(client, worker, path, _TIMEOUT_S)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise FetchFailed(f"{path} answers {status}")  # it is starting
        if status != HTTPStatus.OK:
            continue
        try:
            sources = read(body, worker.host)
            events = [(each.rank, _as_config(each)) for each in sources if _can_be_followed(each, worker.name)]
        except ValueError as error:
            log.warning("%s cannot be used: %s", path, error, extra={"worker": worker.name})
            continue
        if sources:
            return events
    return []


def _can_be_followed(source: EventSource, worker: str) -> bool:
    if not source.binds:
        log.warning(
            "the engine connects to %s to publish its KV events; let it bind instead: tcp://*:5557",
            source.endpoint,
            extra={"worker": worker},
        )
    return source.binds


def _as_config(source: EventSource) -> KvEventsConfig:
    try:
        return KvEventsConfig(endpoint=source.endpoint, replay_endpoint=source.replay_endpoint, topic=source.topic)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False)[0]["msg"]) from None
