"""SIGHUP: the configuration is read again, and what can change while requests run is taken over from it.

Policies and listed workers can: only requests that come later notice. All else has been built into what was started.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gateway.config import Config, WorkerConfig
from gateway.errors import ConfigError
from gateway.fleet.registry import Registry, Worker

log = logging.getLogger("kvway.reload")


class Hangups:
    """The SIGHUPs that this process gets. From now on they do not end it."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._came.set)

    async def configs(self, read: Callable[[], Config]) -> AsyncIterator[Config]:
        """Yield the configuration as it is after each SIGHUP; what is wrong with it is logged instead.

        Args:
            read: returns it, in a thread; raises ConfigError.
        """
        while True:
            await self._came.wait()
            self._came.clear()
            try:
                yield await asyncio.to_thread(read)
            except ConfigError as error:
                log.error("SIGHUP changes nothing: %s", "; ".join(str(error).splitlines()))


@dataclass(frozen=True, slots=True)
class Reload:
    """What comes of a configuration that was read again.

    Attributes:
        config: in force from now on: the old one, but for what can change while requests run.
        taken_over: keys that differ between the old one and this.
        needs_restart: keys that differ between this and the new one.
    """

    config: Config
    taken_over: list[str]
    needs_restart: list[str]

    def report(self) -> None:
        """Log it in one line."""
        level = logging.WARNING if self.needs_restart else logging.INFO
        keys = {"taken_over": ", ".join(self.taken_over), "needs_restart": ", ".join(self.needs_restart)}
        log.log(level, "the configuration was read again", extra=keys)


def compare(old: Config, new: Config) -> Reload:
    """Return what of ``new`` can follow ``old`` while requests run."""
    names = old.models | new.models
    old, new = _spelled_out(old, names), _spelled_out(new, names)
    models = {name: each.model_copy(update={"policy": new.models[name].policy}) for name, each in old.models.items()}
    live = {"policy": new.policy, "routes": new.routes, "workers": new.workers, "models": models}
    config = old.model_copy(update=live)
    before, now, wanted = old.model_dump(), config.model_dump(), new.model_dump()
    return Reload(config, list(_differences(before, now)), list(_differences(now, wanted)))


def follow_workers(registry: Registry, old: Iterable[WorkerConfig], new: Iterable[WorkerConfig]) -> None:
    """Take workers that are no longer listed, or otherwise, out of a registry, and add those that are listed now.

    Running requests go on, as they do when discovered workers leave.
    """
    was, now = ({entry.label: entry for entry in entries} for entries in (old, new))
    for name in was:
        if was[name] != now.get(name):
            registry.remove(name)
            log.info("worker has left", extra={"worker": name})
    for name, entry in now.items():
        if entry != was.get(name):
            registry.add(Worker.from_config(entry))
            log.info("worker has joined", extra={"worker": name, "url": entry.url})


def _spelled_out(config: Config, names: Iterable[str]) -> Config:
    """Give each of these models an entry: without one, the settings of ``*`` hold for it, but no policy of its own."""
    models = {
        name: config.models.get(name) or config.model_config_for(name).model_copy(update={"policy": None})
        for name in names
    }
    return config.model_copy(update={"models": models})


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield the keys, dotted, under which two dumped configurations differ. A list is compared whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key
