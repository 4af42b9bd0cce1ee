"""A trace played to simulated workers through the real gateway: processes, sockets and KV events, on a faster clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from sim.requests import SimRequest, Trace
from tests.processes import free_ports, kvway, running, write_config

SPEED = 2.0  # how many times faster than a GPU the workers run: what the gateway and sockets take counts so much more
START_S = 60.0
_BLOCK_MARK = 1_000


def prompt_of(request: SimRequest, number: int, block_tokens: int) -> list[int]:
    """Return token ids: the same for equal blocks, different for different ones, and a tail of the request's own."""
    ids: list[int] = []
    for chunk in request.chunks:
        ids += [_BLOCK_MARK + chunk, *[1] * (block_tokens - 1)]
    rest = request.prompt_tokens - len(ids)
    return ids + [2, *map(int, str(number))][:rest] + [3] * (rest - 1 - len(str(number)))


async def play(trace: Trace, workers: int, capacity_tokens: int, policy: str) -> dict[str, float]:
    """Play a closed-loop trace and return hit rate and TTFT, in seconds of the workers' clock."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(2 + 3 * workers)
        entries = [
            _start_worker(stack, ports[2 + 3 * number : 5 + 3 * number], capacity_tokens) for number in range(workers)
        ]
        config = {
            "server": {"host": "127.0.0.1", "port": ports[0], "admin_port": ports[1], "drain_s": 1},
            "workers": entries,
            "prompt": {"chunk_tokens": trace.block_tokens},
            "policy": {"name": policy},
            "log": {"level": "warning", "requests": False},
        }
        stack.enter_context(running(kvway("serve", "--config", write_config(folder, config))))
        await _until_ready(f"http://127.0.0.1:{ports[1]}", workers)
        return await _play(trace, f"http://127.0.0.1:{ports[0]}")


def _start_worker(stack: contextlib.ExitStack, ports: list[int], capacity_tokens: int) -> dict[str, Any]:
    http, events, replay = ports
    published = {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    flags = {
        "--port": http,
        "--capacity-tokens": capacity_tokens,
        "--speed": SPEED,
        "--stream-interval": 16,
        "--kv-events": published["endpoint"],
        "--kv-replay": published["replay_endpoint"],
    }
    stack.enter_context(running(kvway("worker", *(str(word) for flag in flags.items() for word in flag))))
    return {"url": f"http://127.0.0.1:{http}", "kv_events": published}


async def _until_ready(admin: str, workers: int) -> None:
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                states = [each["state"] for each in (await client.get(f"{admin}/admin/workers")).json()]
                if states == ["ready"] * workers:
                    return
            await asyncio.sleep(0.1)


async def _play(trace: Trace, url: str) -> dict[str, float]:
    sessions: dict[str | None, list[tuple[int, SimRequest]]] = defaultdict(list)
    for number, request in enumerate(trace.requests):
        sessions[request.session].append((number, request))
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
    ttfts, cached, prompts = [], 0, 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def play_session(turns: list[tuple[int, SimRequest]]) -> None:
            nonlocal cached, prompts
            for turn, (number, request) in enumerate(turns):
                await asyncio.sleep((request.think_s if turn else request.arrival_s) / SPEED)
                ttft_s, usage = await _ask(client, bodies[number])
                ttfts.append(ttft_s * SPEED)
                prompts += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*map(play_session, sessions.values()))
    p50, p90 = np.percentile(ttfts, (50, 90))
    return {"hit_rate": cached / prompts, "ttft_p50_s": float(p50), "ttft_p90_s": float(p90)}


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
