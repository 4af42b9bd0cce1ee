"""Simulated workers that hand KV over, as a gateway sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from sim.server import Fault, SimWorker
from tests.golden import DATA
from tests.sim_clients import worker_and_client

TEXT = "/v1/completions"
IDS = list(range(100, 420))
LEASE_S = 3600.0  # of clocks that run faster than the machine may be
PREFILL = {"prompt": IDS, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
CAPTURED = msgspec.json.decode((DATA / "vllm-0.32" / "pd_nixl.json").read_bytes())["completions"]

Served = tuple[SimWorker, httpx.AsyncClient]


@asynccontextmanager
async def pair(
    pd: str, prefill: Fault | None = None, decode: Fault | None = None
) -> AsyncIterator[tuple[Served, Served]]:
    async with AsyncExitStack() as stack:
        served = []
        for role, fault in (("prefill", prefill), ("decode", decode)):
            faults = (fault,) if fault else ()
            worker = worker_and_client(pd=pd, role=role, faults=faults, lease_s=LEASE_S)
            served.append(await stack.enter_async_context(worker))
        yield served[0], served[1]


async def prefilled(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post(TEXT, json=PREFILL)
    assert answer.status_code == 200
    return dict(answer.json()["kv_transfer_params"])


async def decoded(client: httpx.AsyncClient, params: dict[str, Any]) -> httpx.Response:
    return await client.post(TEXT, json={"prompt": IDS, "max_tokens": 5, "kv_transfer_params": params})


async def test_parameters_have_the_fields_of_a_real_engine():
    async with pair("nixl") as ((_, prefill), _):
        params = await prefilled(prefill)
    assert params.keys() == CAPTURED["prefill_response"]["kv_transfer_params"].keys()


async def test_a_decode_worker_computes_one_token_of_a_prompt_that_was_handed_over():
    async with pair("nixl") as ((first, prefill), (second, decode)):
        answer = await decoded(decode, await prefilled(prefill))
        assert answer.status_code == 200
        held = second.engine.worker.cache
        assert answer.json()["usage"]["completion_tokens"] == 5
        again = await decode.post(TEXT, json={"prompt": IDS, "max_tokens": 1})
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 304
        assert held.free_blocks == first.engine.worker.cache.free_blocks


async def test_kv_is_handed_over_once():
    async with pair("nixl") as ((_, prefill), (_, decode)):
        params = await prefilled(prefill)
        assert (await decoded(decode, params)).status_code == 200
        again = await decoded(decode, params)
        assert (again.status_code, "could not be loaded" in again.text) == (500, True)


@pytest.mark.parametrize(
    ("pd", "fields", "status"),
    [
        ("nixl", {"kv_transfer_params": {"do_remote_prefill": True}}, 200),
        ("nixl", {"kv_transfer_params": {"remote_block_ids": [[1]], "remote_host": "x", "remote_port": "y"}}, 200),
        ("mooncake", {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "1"}}, 200),
        ("sglang", {"bootstrap_room": 3}, 200),
        ("sglang", {"bootstrap_room": 3, "bootstrap_host": "127.0.0.1", "bootstrap_port": 99999}, 500),
        (
            "mooncake",
            {
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "transfer_id": "1",
                    "remote_bootstrap_addr": "http://x:y",
                }
            },
            500,
        ),
    ],
)
async def test_kv_that_is_not_named_in_full_is_computed_and_what_is_nowhere_is_an_error(pd, fields, status):
    async with worker_and_client(pd=pd) as (_, client):
        answer = await client.post(TEXT, json={"prompt": IDS, "max_tokens": 2} | fields)
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["usage"]["completion_tokens"] == 2
    else:
        assert "could not be loaded" in answer.json()["error"]["message"]


async def test_what_is_kept_for_the_next_turn_is_not_kept_for_ever():
    async with pair("nixl") as ((_, prefill), _), worker_and_client(pd="nixl", pull_back_s=1e-9) as (worker, decode):
        for _ in range(3):
            assert (await decoded(decode, await prefilled(prefill))).json()["kv_transfer_params"]["do_remote_decode"]
        assert len(worker._hand_overs._offers) == 1


async def test_a_lease_ends():
    async with pair("nixl", prefill=Fault("expire_lease", count=1)) as ((_, prefill), (_, decode)):
        assert (await decoded(decode, await prefilled(prefill))).status_code == 500
        assert (await decoded(decode, await prefilled(prefill))).status_code == 200


async def test_a_dead_prefill_worker_holds_nothing():
    async with pair("nixl") as ((dying, prefill), (_, decode)):
        params = await prefilled(prefill)
        dying.begin_fault(Fault("die"))
        assert (await decoded(decode, params)).status_code == 500


async def test_a_dead_prefill_worker_ends_at_once_with_those_who_wait_for_its_kv():
    settings = {"pd": "mooncake", "role": "prefill", "lease_s": LEASE_S}
    async with asyncio.timeout(30), worker_and_client(**settings) as (dying, client):
        waiting = asyncio.ensure_future(client.get("/sim/kv/nothing", params={"wait": LEASE_S}))
        await client.get("/health")  # so that it has been read, too
        dying.begin_fault(Fault("die"))
        await asyncio.gather(waiting, return_exceptions=True)


async def test_kv_takes_longer_over_a_slow_link():
    async with (
        pair("nixl", decode=Fault("slow_link", factor=5000)) as ((_, prefill), (_, slow)),
        worker_and_client(pd="nixl", role="decode") as (_, fast),
    ):
        first = asyncio.ensure_future(decoded(slow, await prefilled(prefill)))
        assert (await decoded(fast, await prefilled(prefill))).status_code == 200
        assert not first.done()
        assert (await first).status_code == 200


async def test_legs_that_run_at_once_wait_for_each_other():
    async with pair("mooncake") as ((_, prefill), (_, decode)):
        engine = (await prefill.get("/query")).json()["0"]["engine_id"]
        params = {"do_remote_prefill": True, "transfer_id": "x", "remote_engine_id": engine}
        params["remote_bootstrap_addr"] = str(prefill.base_url).rstrip("/")
        waiting = asyncio.ensure_future(decoded(decode, params))
        body = PREFILL | {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "x"}}
        assert (await prefill.post(TEXT, json=body)).status_code == 200
        assert (await waiting).status_code == 200


async def test_an_sglang_worker_of_one_role_refuses_requests_that_name_no_room():
    async with pair("sglang") as served:
        for _, client in served:
            answer = await client.post(TEXT, json={"prompt": IDS})
            assert (answer.status_code, "bootstrap room" in answer.text) == (400, True)


async def test_a_prefill_worker_pulls_what_the_decode_worker_keeps_of_the_turn_before():
    async with (
        worker_and_client(pd="nixl", role="prefill", lease_s=LEASE_S) as (_, prefill),
        worker_and_client(pd="nixl", role="prefill") as (_, other),
        worker_and_client(pd="nixl", role="decode", pull_back_s=LEASE_S) as (_, decode),
    ):
        kept = (await decoded(decode, await prefilled(prefill))).json()["kv_transfer_params"]
        assert (kept["do_remote_decode"], kept["do_remote_prefill"], kept["remote_num_tokens"]) == (True, False, 324)
        body = PREFILL | {"prompt": [*IDS, *range(50)], "kv_transfer_params": kept | {"remote_num_tokens": 320}}
        answer = await other.post(TEXT, json=body)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
        assert (await other.post(TEXT, json=body)).status_code == 500  # given away once
