"""What a source of workers says, and how it says it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.config_workers import FoundConfig, KvEventsConfig, WorkerConfig

log = logging.getLogger("kvway.discovery")


@dataclass(slots=True, frozen=True)
class Found:
    """One engine that a source knows of.

    Attributes:
        config: as it would be written under ``workers``.
        life: tells engines apart that follow each other under one name and address: a pod's uid.
        accepts: whether it may get new requests. One that may not does not join; one that has joined finishes what it
            has.
        asks: whether the engine is to be asked where it publishes KV events, and for how many data-parallel ranks.
    """

    config: WorkerConfig
    life: str = ""
    accepts: bool = True
    asks: bool = False


class Reporter:
    """Where one source says what it has found, and what keeps it from finding.

    Args:
        name: of the source, after its place in the configuration: ``dns[0]``.
        on_said: called whenever the source has said something.

    Attributes:
        workers: what the source said last; stays while it fails.
        refused: why some of what it found cannot be used, one message each.
        problem: what went wrong last; empty while all is well.
        errors: how often something went wrong.
        succeeded_at: when all went well last, Unix seconds; 0 before the first time.
    """

    def __init__(self, name: str, on_said: Callable[[], None]) -> None:
        self.name = name
        self.workers: Sequence[Found] = ()
        self.refused: Sequence[str] = ()
        self.problem = ""
        self.errors = 0
        self.succeeded_at = 0.0
        self._on_said = on_said

    def found(self, workers: Sequence[Found], refused: Sequence[str] = (), complete: bool = True) -> None:
        """Say what there is now.

        Args:
            workers: all of them.
            refused: see above.
            complete: all went well; otherwise a failure that was told still stands for a part of it.
        """
        if complete:
            if self.problem:
                log.info("%s works again", self.name)
            self.problem = ""
            self.succeeded_at = time.time()
        for message in refused:
            if message not in self.refused:
                log.warning("%s: %s", self.name, message)
        self.refused = refused
        self.workers = workers
        self._on_said()

    def failed(self, message: str) -> None:
        """Nothing could be found out; what was found before still holds."""
        self.errors += 1
        if message != self.problem:
            log.warning("%s: %s; what was found before still counts", self.name, message)
        self.problem = message
        self._on_said()


class Source(Protocol):
    """Somebody who knows workers."""

    async def run(self, report: Reporter) -> None:
        """Report what there is whenever it changes, until cancelled."""
        ...


def engines_at(host: str, port: int, name: str | None, settings: FoundConfig, rank: int = 0) -> list[WorkerConfig]:
    """Return the entries under ``workers`` for one HTTP endpoint: one, or one per data-parallel rank behind it.

    Args:
        host: name or address; IPv6 without brackets.
        port: of its HTTP server.
        name: of the worker; None for ``host:port``.
        settings: what the source says of all its workers.
        rank: of the engine among several on one host: its KV events are that many ports further on.

    Raises:
        pydantic.ValidationError: these make no worker.
    """
    host = f"[{host}]" if ":" in host else host
    shared = settings.model_dump(exclude=FoundConfig.own_keys())
    shared["url"] = f"{settings.scheme}://{host}:{port}"
    ranks = 1 if settings.kv_events_port is None else settings.data_parallel_size
    entries = []
    for each in range(ranks):
        entry = WorkerConfig(**shared, name=name, kv_events=_events(host, rank + each, settings))
        entries.append(entry if ranks == 1 else as_rank(entry, each))
    return entries


def as_rank(worker: WorkerConfig, rank: int) -> WorkerConfig:
    """Return the entry of one data-parallel rank of an engine: a worker of its own behind the same port."""
    return worker.model_copy(update={"name": f"{worker.label}-dp{rank}", "data_parallel_rank": rank})


def _events(host: str, offset: int, settings: FoundConfig) -> KvEventsConfig | None:
    if settings.kv_events_port is None:
        return None
    replay = settings.kv_replay_port
    return KvEventsConfig(
        endpoint=f"tcp://{host}:{settings.kv_events_port + offset}",
        replay_endpoint=None if replay is None else f"tcp://{host}:{replay + offset}",
        topic=settings.kv_topic,
    )
