"""Simulated workers that write KV to one another as LMCache does, as a gateway sees them, and before a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from gateway.fleet.registry import State
from sim.server import Fault, SimWorker
from tests.pd_rig import ALWAYS, CHAT, TEXT, ask, counted, fleet, handovers, port_of, text_of
from tests.peers import eventually
from tests.sim_clients import scrape, worker_and_client

IDS = list(range(100, 420))
LEASE_S = 3600.0  # of clocks that run faster than the machine may be
DEADLINE_S = 10
SLOW = Fault("slow_link", factor=1e6)


class Pair:
    """Two workers, and the socket at which the first one says what it has written to the second."""

    def __init__(
        self, prefill: httpx.AsyncClient, decode: httpx.AsyncClient, decoder: SimWorker, notices: zmq.asyncio.Socket
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.decoder = decoder
        self._notices = notices

    async def prefilled(self, ranks: int = 1, **fields: Any) -> dict[str, Any]:
        ports = [port_of(self.decoder)] * ranks
        spec = {"req_id": "r1", "receiver_host": "127.0.0.1"}
        spec |= {"receiver_init_port": ports, "receiver_alloc_port": ports}
        params = {"ret_first_tok": True, "disagg_spec": spec}
        body = {"prompt": IDS, "max_tokens": 1, "kv_transfer_params": params, **fields}
        answer = await self.prefill.post(TEXT, json=body)
        assert answer.status_code == 200
        return dict(answer.json())

    async def notice(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return msgspec.msgpack.decode(await self._notices.recv())

    async def cached(self, **fields: Any) -> int:
        """Return what a decode request for the prompt has not to compute."""
        answer = await self.decode.post(TEXT, json={"prompt": IDS, "max_tokens": 5, **fields})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@asynccontextmanager
async def pair(*decode: Fault) -> AsyncIterator[Pair]:
    context = zmq.asyncio.Context()
    try:
        notices = context.socket(zmq.PULL)
        port = notices.bind_to_random_port("tcp://127.0.0.1")
        shared = {"pd": "lmcache", "lease_s": LEASE_S, "adapters": ("sql",)}
        async with (
            worker_and_client(role="prefill", lmcache_proxy=f"tcp://127.0.0.1:{port}", **shared) as (_, prefill),
            worker_and_client(role="decode", faults=decode, **shared) as (decoder, decoding),
        ):
            yield Pair(prefill, decoding, decoder, notices)
    finally:
        context.destroy(linger=0)


async def test_a_prompt_is_written_to_the_worker_that_is_named_and_every_rank_says_so() -> None:
    async with pair() as workers:
        answer = await workers.prefilled(ranks=2)
        assert isinstance(answer["kv_transfer_params"]["first_tok"], int)
        notices = [await workers.notice() for _ in range(2)]
        assert notices == [{"type": "ProxyNotif", "req_id": "r1"}] * 2
        assert await workers.cached() == len(IDS) - 1


@pytest.mark.parametrize("fields", [{"model": "sql"}, {"cache_salt": "mine"}, {"prompt": [*IDS, 1]}])
async def test_it_is_found_by_the_same_tokens_model_and_salt_only_and_once(fields: dict[str, Any]) -> None:
    async with pair() as workers:
        await workers.prefilled()
        await workers.notice()
        assert await workers.cached(**fields) == 0
        assert await workers.cached() == len(IDS) - 1
        assert await workers.cached() < len(IDS) - 1  # what it has computed itself, whole blocks


async def test_what_is_lost_is_told_of_by_nobody_and_what_has_expired_is_computed() -> None:
    async with pair(Fault("lose_transfer", count=1), Fault("expire_lease", count=1)) as workers:
        await workers.prefilled()
        await workers.prefilled(cache_salt="second")
        await workers.notice()
        assert await workers.cached(cache_salt="second") == 0
        await workers.prefilled(cache_salt="third")
        await workers.notice()
        assert await workers.cached(cache_salt="third") == len(IDS) - 1
        assert await workers.cached() == 0


async def test_over_a_slow_link_the_answer_comes_first() -> None:
    async with pair(SLOW) as workers:
        await workers.prefilled()
        assert await workers.cached() == 0  # it is still on its way


@pytest.mark.parametrize("spec", [{}, {"req_id": 1}, 3])
async def test_a_spec_that_cannot_be_understood_is_the_requests_fault(spec: Any) -> None:
    async with pair() as workers:
        body = {"prompt": IDS, "kv_transfer_params": {"disagg_spec": spec}}
        answer = await workers.prefill.post(TEXT, json=body)
        assert (answer.status_code, "disagg_spec" in answer.text) == (400, True)


async def test_the_gateways_decode_worker_computes_nothing_of_what_was_written() -> None:
    async with fleet("lmcache") as apart:
        assert (await ask(apart.rig, CHAT)).status == 200
        await apart.rig.settled()
        assert handovers(apart.rig) == counted("w0", "w1", "completed")
        async with httpx.AsyncClient(base_url=apart.decodes[0].url) as decode:
            samples = await scrape(decode)
        assert samples["vllm:prompt_tokens_by_source_total", "local_compute"] == 1


async def test_kv_that_does_not_arrive_in_time_leaves_the_request_whole() -> None:
    config = ALWAYS | {"lease_s": 0.1}
    async with fleet("lmcache", decodes=(Fault("lose_transfer", count=1),), disaggregation=config) as apart:
        message = await ask(apart.rig, CHAT)
        assert message.status == 200 and text_of(message)
        assert (await apart.rig.settled()).reason != "apart"
        assert handovers(apart.rig) == counted("w0", "", "prefill_failed")
        assert apart.rig.blamed == []


@pytest.mark.parametrize("leaves", [False, True], ids=["ejected", "gone"])
async def test_a_worker_that_is_lost_while_it_is_written_to_is_not_waited_for(leaves: bool) -> None:
    config = ALWAYS | {"lease_s": LEASE_S}
    async with fleet("lmcache", decodes=(SLOW, SLOW), disaggregation=config) as apart:
        asked = asyncio.ensure_future(ask(apart.rig, CHAT))
        registry, engine = apart.rig.services.registry, apart.prefills[0].engine
        await eventually(lambda: bool(engine.worker.counters.prefix_queries) and not len(engine))  # it writes
        for name in ("w1", "w2"):
            registry.remove(name) if leaves else registry.set_state(registry.workers[name], State.EJECTED)
        message = await asked
        assert message.status == 200 and text_of(message)
        assert (await apart.rig.settled()).reason != "apart"
