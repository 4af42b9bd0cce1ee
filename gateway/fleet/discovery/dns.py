"""Workers behind one DNS name: the pods of a headless Service, or a round-robin record."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable

from gateway.config_workers import DnsConfig
from gateway.fleet.discovery.found import Found, Reporter, engines_at

Resolver = Callable[[str], Awaitable[list[str]]]
"""Returns all addresses of a name; raises OSError if there is no answer."""


async def resolve(name: str) -> list[str]:
    """Return the addresses that the system's resolver has for ``name``.

    Raises:
        OSError: it has none, or does not answer.
    """
    answers = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


class DnsSource:
    """Resolves a name again and again.

    A name without addresses counts as a failure, as DNS cannot tell it from a mistake: the last answer still holds,
    and health probes find out which of those workers are gone.

    Args:
        config: which name, and how often.
        resolver: who is asked.
    """

    def __init__(self, config: DnsConfig, resolver: Resolver = resolve) -> None:
        self._config = config
        self._resolver = resolver
        self._engines: dict[str, list[Found]] = {}

    async def run(self, report: Reporter) -> None:
        """See ``Source``."""
        config = self._config
        asked: asyncio.Future[list[str]] | None = None
        try:
            while True:
                # One look-up at a time: a silent resolver holds the thread of each, and the process has but a few.
                asked = asked or asyncio.ensure_future(self._resolver(config.name))
                if (await asyncio.wait({asked}, timeout=config.timeout_s))[0]:
                    self._take(asked, report)
                    asked = None
                else:
                    report.failed(f"{config.name} is not resolved within {config.timeout_s:g} s")
                await asyncio.sleep(config.interval_s * random.uniform(0.9, 1.1))
        finally:
            if asked is not None:
                asked.cancel()

    def _take(self, answer: asyncio.Future[list[str]], report: Reporter) -> None:
        try:
            present = of_one_family(answer.result())
        except (OSError, UnicodeError) as error:
            report.failed(f"{self._config.name} cannot be resolved: {getattr(error, 'strerror', None) or error}")
        else:
            self._engines = {each: self._engines.get(each) or self._engines_at(each) for each in present}
            report.found([found for engines in self._engines.values() for found in engines])

    def _engines_at(self, address: str) -> list[Found]:
        worker = self._config.worker
        asks = worker.kv_events_port is None
        return [Found(entry, asks=asks) for entry in engines_at(address, worker.port, None, worker)]


def of_one_family(addresses: list[str]) -> list[str]:
    """Return the IPv4 addresses, or the IPv6 ones where there are no others: a pod with both must not count twice."""
    families: dict[int, set[str]] = {4: set(), 6: set()}
    for address in addresses:
        families[ipaddress.ip_address(address).version].add(address)
    return sorted(families[4] or families[6])
