"""A trace played to simulated workers through the real gateway: processes, sockets and KV events.

All clocks run ``speed`` times as fast as a GPU's: the slower, the less counts what the gateway and sockets take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families as parse

from policies.base import known_policies
from sim.fleet import FleetSettings
from sim.requests import SimRequest, Trace
from tests.processes import free_ports, kvway, running, write_config

START_S = 60.0
_BLOCK_MARK = 1_000
_BEHIND = "kvway_worker_behind_seconds_total"


@dataclass(slots=True, frozen=True)
class Served:
    """One request as its client saw it, in seconds of the workers' clock.

    Attributes:
        late_s: how much later it was sent than the trace says.
        ttft_s: from sending it to the first token.
        ended_s: when its last token came, counted from the beginning of the trace.
        cached_tokens: tokens of its prompt that the worker found in its cache.
    """

    late_s: float
    ttft_s: float
    ended_s: float
    cached_tokens: int


def prompt_of(request: SimRequest, number: int, block_tokens: int) -> list[int]:
    """Return token ids: the same for equal blocks, different for different ones, and a tail of the request's own."""
    ids: list[int] = []
    for chunk in request.chunks[: request.prompt_tokens // block_tokens]:
        ids += [_BLOCK_MARK + chunk, *[1] * (block_tokens - 1)]
    rest = request.prompt_tokens - len(ids)
    return ids + [2, *map(int, str(number))][:rest] + [3] * (rest - 1 - len(str(number)))


async def play(trace: Trace, fleet: FleetSettings, policy: str, speed: float) -> tuple[list[Served], float]:
    """Send every request at its time, to a gateway that knows of its fleet what a simulated one knows.

    Returns:
        What was served, and the time that the workers lost to the machine, all together, by their clock.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(2 + 3 * fleet.workers)
        entries = [
            _start_worker(stack, worker_ports, fleet, speed)
            for worker_ports in zip(ports[2::3], ports[3::3], ports[4::3], strict=True)
        ]
        config = {
            "server": {"host": "127.0.0.1", "port": ports[0], "admin_port": ports[1], "drain_s": 1},
            "workers": entries,
            "prompt": {"chunk_tokens": trace.block_tokens},
            "index": {"speculative_ttl_s": fleet.gateway.speculation_s / speed},
            "policy": {"name": policy, "params": _times_of(policy, speed)},
            "dispatch": {"order": fleet.gateway.order},
            "replication": {"enabled": False},  # nor does the simulated gateway copy prefixes
            "log": {"level": "warning", "requests": False},
        }
        stack.enter_context(running(kvway("serve", "--config", write_config(folder, config))))
        await _until_ready(f"http://127.0.0.1:{ports[1]}", fleet.workers)
        served = await _play(trace, f"http://127.0.0.1:{ports[0]}", speed)
        return served, speed * sum([await _behind_s(entry["url"]) for entry in entries])


def _start_worker(
    stack: contextlib.ExitStack, ports: tuple[int, int, int], fleet: FleetSettings, speed: float
) -> dict[str, Any]:
    http, events, replay = ports
    published = {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    flags = {
        "--port": http,
        "--profile": fleet.profile,
        "--capacity-tokens": fleet.capacity_tokens,
        "--max-model-len": fleet.capacity_tokens,
        "--speed": speed,
        "--stream-interval": 16,
        "--kv-events": published["endpoint"],
        "--kv-replay": published["replay_endpoint"],
    }
    stack.enter_context(running(kvway("worker", *(str(word) for flag in flags.items() for word in flag))))
    profile = fleet.speed
    prefill = {
        "a_s": profile.prefill_a_s / speed,
        "b_s": profile.prefill_b_s / speed,
        "c_s": profile.prefill_c_s / speed,
    }
    return {"url": f"http://127.0.0.1:{http}", "kv_events": published, "prefill": prefill}


def _times_of(policy: str, speed: float) -> dict[str, float]:
    """Return those parameters of a policy that are times or rates, by the gateway's clock."""
    defaults = known_policies()[policy].Params()
    values = {name: getattr(defaults, name) for name in defaults.__struct_fields__ if name.endswith("_s")}
    return {
        name: value * speed if name.endswith("_per_s") else value / speed
        for name, value in values.items()
        if value is not None
    }


async def _until_ready(admin: str, workers: int) -> None:
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                states = [each["state"] for each in (await client.get(f"{admin}/admin/workers")).json()]
                if states == ["ready"] * workers:
                    return
            await asyncio.sleep(0.1)


async def _behind_s(worker: str) -> float:
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"{worker}/metrics")).raise_for_status().text
    return next(sample.value for family in parse(metrics) for sample in family.samples if sample.name == _BEHIND)


async def _play(trace: Trace, url: str, speed: float) -> list[Served]:
    bodies = [
        json.dumps(
            {
                "model": "sim",
                "prompt": prompt_of(request, number, trace.block_tokens),
                "max_tokens": request.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for number, request in enumerate(trace.requests)
    ]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120 / min(1.0, speed), limits=limits) as client:
        began = perf_counter()
        served: list[Served | None] = [None] * len(bodies)

        async def serve_in_turn(numbers: list[int]) -> None:
            """Serve requests that wait for each other: those of a session, or a single one."""
            due = began + trace.requests[numbers[0]].arrival_s / speed
            for number in numbers:
                if number != numbers[0]:
                    due = perf_counter() + trace.requests[number].think_s / speed
                await asyncio.sleep(due - perf_counter())
                late_s = perf_counter() - due
                ttft_s, usage = await _ask(client, bodies[number])
                ended_s = perf_counter() - began
                cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
                served[number] = Served(late_s * speed, ttft_s * speed, ended_s * speed, cached_tokens)

        await asyncio.gather(*map(serve_in_turn, _in_turn(trace)))
        return [each for each in served if each is not None]


def _in_turn(trace: Trace) -> list[list[int]]:
    """Return the numbers of the requests that wait for each other's answers."""
    if not trace.closed_loop:
        return [[number] for number in range(len(trace.requests))]
    sessions: dict[object, list[int]] = {}
    for number, request in enumerate(trace.requests):
        sessions.setdefault(number if request.session is None else request.session, []).append(number)
    return list(sessions.values())


async def _ask(client: httpx.AsyncClient, body: bytes) -> tuple[float, dict[str, Any]]:
    """Return seconds to the first token and the usage of an answer."""
    began, first_s, usage = perf_counter(), 0.0, None
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or perf_counter() - began
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None, "the answer has no usage"
    return first_s, usage
