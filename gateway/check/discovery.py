"""What the sources of workers find now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httpx

from gateway.check.findings import Notebook
from gateway.config import Config, WorkerConfig
from gateway.errors import ConfigError
from gateway.fleet.discovery.discovery import sources_of
from gateway.fleet.discovery.engine import ask_engine
from gateway.fleet.discovery.found import Found, Reporter, Source
from gateway.fleet.polling import FetchFailed
from gateway.tasks import spawn, stop


async def find_workers(
    config: Config, client: httpx.AsyncClient, timeout_s: float
) -> tuple[list[WorkerConfig], list[Notebook]]:
    """Let every source look once.

    Args:
        config: the gateway's.
        client: for questions to the engines found.
        timeout_s: how long one answer may take.

    Returns:
        The workers that are listed or take requests, and what is to be said of each source.
    """
    try:
        sources = list(sources_of(config.discovery))
    except ConfigError as error:
        notes = Notebook("discovery")
        notes.problem("found", str(error), "correct the section discovery; docs/configuration.md has its keys")
        return list(config.workers), [notes]
    reports = await asyncio.gather(*(_look(name, source, 2 * timeout_s) for name, source in sources))
    _refuse_doubles(reports, config.workers)
    takers = [found for report in reports for found in report.workers if found.accepts]
    asked = await asyncio.gather(*(_ask(client, found) for found in takers))
    workers: dict[str, WorkerConfig] = {}
    for worker in (*config.workers, *(each for entries in asked for each in entries)):
        workers.setdefault(worker.label, worker)
    return list(workers.values()), [_note(report) for report in reports]


async def _look(name: str, source: Source, timeout_s: float) -> Reporter:
    said = asyncio.Event()
    report = Reporter(name, said.set)
    looking = spawn(source.run(report), f"look at {name}")
    try:
        async with asyncio.timeout(timeout_s):
            await said.wait()
    except TimeoutError:
        report.failed(f"nothing is found within {timeout_s:g} s")
    finally:
        await stop(looking)
    return report


def _refuse_doubles(reports: Iterable[Reporter], listed: Iterable[WorkerConfig]) -> None:
    """Note at each source what the gateway leaves out, as another engine has the name."""
    urls = {worker.label: worker.url for worker in listed}
    for report in reports:
        for config in (found.config for found in report.workers if found.accepts):
            if (first := urls.setdefault(config.label, config.url)) != config.url:
                double = f"{config.url} is left out: {first} is called {config.label}, too"
                report.refused = [*report.refused, f"{double}; one source with all namespaces tells pods apart"]


async def _ask(client: httpx.AsyncClient, found: Found) -> Iterable[WorkerConfig]:
    if not found.asks:
        return [found.config]
    try:
        return await ask_engine(client, found.config)
    except FetchFailed:
        return [found.config]  # what is wrong with it comes out when it is looked at


def _note(report: Reporter) -> Notebook:
    notes = Notebook(f"discovery.{report.name}")
    if report.problem:
        notes.problem("found", report.problem, "see docs/discovery.md")
        return notes
    away = sum(not found.accepts for found in report.workers)
    names = [found.config.label for found in report.workers if found.accepts]
    waiting = f", and {away} that may get no new requests" if away else ""
    if names:
        notes.ok("found", f"{', '.join(names)}{waiting}")
    else:
        notes.problem("found", f"no workers{waiting}", "correct the selector, name or file; are the engines ready?")
    for message in report.refused:
        notes.problem("usable", message, "correct it there")
    return notes
