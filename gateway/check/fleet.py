"""``kvway check``: holds a running fleet to what the configuration says of it, worker by worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import zmq.asyncio

from gateway.check.discovery import find_workers
from gateway.check.engine import Engine, look_at_engine
from gateway.check.events import EventCheck
from gateway.check.findings import Finding, Notebook
from gateway.check.prompts import Probe, Prompts, compare_tokens, send_twice
from gateway.check.roles import look_at_role
from gateway.check.shared import look_at_redis
from gateway.config import Config, WorkerConfig
from gateway.fleet.polling import control_client
from gateway.prompt.pipeline import PromptPipeline


@dataclass(slots=True, frozen=True)
class CheckOptions:
    """How to check.

    Attributes:
        send_prompts: send every worker one prompt twice, to see events and overlap.
        timeout_s: how long to wait for one answer.
        clock: Unix seconds.
    """

    send_prompts: bool = True
    timeout_s: float = 5.0
    clock: Callable[[], float] = time.time


@dataclass(slots=True, frozen=True)
class _Tools:
    """What the checks of all workers use."""

    config: Config
    options: CheckOptions
    client: httpx.AsyncClient
    pipeline: PromptPipeline
    context: zmq.asyncio.Context


async def check_fleet(config: Config, options: CheckOptions) -> list[Finding]:
    """Look at every worker, listed or found, and at the shared index; workers are looked at side by side.

    Args:
        config: the gateway's.
        options: how to go about it.

    Returns:
        Findings, those about one subject together, in the order of the configuration.
    """
    if not config.workers and not config.discovery:
        notes = Notebook("config")
        notes.problem("workers", "no workers are configured", "list them under workers:, or see docs/discovery.md")
        return notes.findings
    tools = _Tools(config, options, control_client(), PromptPipeline(config), zmq.asyncio.Context())
    try:
        workers, books = await find_workers(config, tools.client, options.timeout_s)
        books += await asyncio.gather(*(_check_worker(worker, workers, tools) for worker in workers))
    finally:
        await tools.pipeline.close()
        await tools.client.aclose()
        tools.context.destroy(linger=0)
    if config.index.backend == "redis":
        books.append(Notebook("redis"))
        await look_at_redis(config.index, books[-1], options.timeout_s)
    return [finding for book in books for finding in book.findings]


async def _check_worker(worker: WorkerConfig, fleet: Sequence[WorkerConfig], tools: _Tools) -> Notebook:
    config, options = tools.config, tools.options
    notes = Notebook(worker.label)
    look_at_role(worker, fleet, notes)
    send_prompts = options.send_prompts and worker.answers_alone
    engine = Engine(worker, tools.client, options.timeout_s)
    if not await look_at_engine(engine, notes, config.prompt, config.health.path, options.clock):
        return notes
    prompts = [Prompts(config, tools.pipeline, engine, base) for base in dict.fromkeys(engine.models.values())]
    for each in prompts:
        await compare_tokens(engine, each, notes)

    async def probe() -> Probe | None:
        return await send_twice(engine, prompts[0], notes, config.prompt.chunk_tokens)

    if worker.kv_events is None:
        _note_no_events(engine, notes)
        if send_prompts:
            await probe()
        return notes
    check = EventCheck(
        engine,
        worker.kv_events,
        notes,
        tools.context,
        config.prompt.chunk_tokens,
        options.timeout_s,
        options.clock,
    )
    await check.run(probe if send_prompts else None)
    return notes


def _note_no_events(engine: Engine, notes: Notebook) -> None:
    if engine.sources:
        source = engine.sources[0]
        message = f"the engine publishes KV events at {source.endpoint}, but none are configured"
        replay = f", replay_endpoint: {source.replay_endpoint}" if source.replay_endpoint else ""
        notes.problem("events", message, f"add to the worker: kv_events: {{endpoint: {source.endpoint}{replay}}}")
    else:
        message = "none are configured: what the worker holds is modelled from what was sent to it"
        notes.note("events", message, "publish KV events and set kv_events of the worker")
