"""A relay before workers with roles, simulated ones in two pools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.observe.observer import Observer
from sim.server import Fault, SimWorker, WorkerSettings
from tests.peers import (
    Message,
    request,
)
from tests.processes import free_ports
from tests.relay_rig import MODEL, Rig, relay

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONNECTORS = ("nixl", "mooncake", "sglang", "lmcache")
RANKS = 2  # of LMCache's workers: each says for itself that it has written
PROMPT = "a story of sixteen bytes or so: " * 40
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
    TEXT: {"prompt": PROMPT, "max_tokens": 12},
}
ALWAYS = {"policy": "always"}
AT_ONCE_S = 0.1
KEPT_S = 3600.0  # of clocks that run faster than the machine may be


def body_of(path: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": MODEL, **BODIES[path], **fields})


async def ask(rig: Rig, path: str, **fields: Any) -> Message:
    async with rig.connect() as client:
        client.send(request(body_of(path, **fields), path))
        return await client.read_message()


@dataclass
class Fleet:
    """A relay before simulated workers: ``prefills`` and ``decodes``."""

    rig: Rig
    prefills: list[SimWorker]
    decodes: list[SimWorker]


@asynccontextmanager
async def fleet(
    connector: str,
    prefills: Sequence[Fault | None] = (None,),
    decodes: Sequence[Fault | None] = (None,),
    **sections: Any,
) -> AsyncIterator[Fleet]:
    """Serve a relay before one simulated worker per fault, in two pools; it holds the first ones for the fastest."""
    async with AsyncExitStack() as stack:
        workers: list[SimWorker] = []
        proxy = f"tcp://127.0.0.1:{free_ports(1)[0]}" if connector == "lmcache" else None
        for role, faults in (("prefill", prefills), ("decode", decodes)):
            for fault in faults:
                settings = WorkerSettings(
                    model=MODEL,
                    role=role,
                    pd=connector,
                    speed=20,
                    lease_s=KEPT_S,
                    pull_back_s=KEPT_S,
                    lmcache_proxy=proxy,
                    faults=(fault,) if fault else (),
                )
                workers.append(await stack.enter_async_context(SimWorker(settings)))
        settings = [
            {
                "role": one.settings.role,
                "pd": connector,
                "bootstrap_port": port_of(one),
                "lmcache_init_ports": [port_of(one)] * RANKS,
                "lmcache_alloc_ports": [port_of(one)] * RANKS,
                "prefill": {"a_s": 0.01 + 0.1 * number if number < len(prefills) else 0.01},
            }
            for number, one in enumerate(workers)
        ]
        sections["disaggregation"] = {"lmcache_bind": proxy, **sections.get("disaggregation", ALWAYS)}
        rig = await stack.enter_async_context(relay([one.url for one in workers], settings=settings, **sections))
        yield Fleet(rig, workers[: len(prefills)], workers[len(prefills) :])


def port_of(worker: SimWorker) -> int:
    return int(worker.url.rpartition(":")[2])


def computed(worker: SimWorker) -> int:
    """Return the prompt tokens that a worker was asked for."""
    return worker.engine.worker.counters.prefix_queries


def handovers(rig: Rig) -> dict[str, float]:
    return handovers_of(rig.services.observer)


def handovers_of(observer: Observer) -> dict[str, float]:
    lines = observer.render().decode().splitlines()
    name = "kvway_handovers_total"
    return {line.split(" ")[0].removeprefix(name): float(line.split(" ")[1]) for line in lines if line.startswith(name)}


def counted(prefill: str, decode: str, outcome: str, count: int = 1) -> dict[str, float]:
    return {f'{{prefill="{prefill}",decode="{decode}",outcome="{outcome}"}}': count}


def text_of(message: Message) -> str:
    """Return the text of an answer, streamed or not."""
    if b"data: " in message.body:
        *events, last, nothing = message.body.split(b"\n\n")
        assert (last, nothing) == (b"data: [DONE]", b"")
        parts = [msgspec.json.decode(one.removeprefix(b"data: ")) for one in events]
    else:
        parts = [msgspec.json.decode(message.body)]
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join(
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content", "")
        for choice in choices
    )
