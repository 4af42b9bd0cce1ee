"""Another policy in a running gateway: for whom, from when, and at no request's expense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from policies.base import known_policies
from tests.gateway_rig import MODEL, STORY, admin_of, fleet, until


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with fleet(policy={"name": "round-robin"}) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client:
        yield client


@pytest.fixture
async def admin(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_of(gateway) as client:
        yield client


async def put(admin: httpx.AsyncClient, **change: Any) -> httpx.Response:
    return await admin.put("/admin/policy", json=change)


async def workers_of(client: httpx.AsyncClient, requests: int, path: str = "/v1/completions") -> list[str]:
    """Ask for the same thing so often, one after the other, and return who answered."""
    prompt = {"messages": [{"role": "user", "content": STORY}]} if "chat" in path else {"prompt": STORY}
    workers = []
    for _ in range(requests):
        answer = await client.post(path, json={"model": MODEL, "max_tokens": 1, **prompt})
        assert answer.status_code == 200
        workers.append(answer.headers["x-kvway-worker"])
    return workers


async def test_the_next_request_goes_by_the_new_policy(client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
    assert len(set(await workers_of(client, 4))) == 2
    answer = await put(admin, name="prefix-hash", params={"load_factor": 8})
    assert answer.status_code == 200
    expected = {"name": "prefix-hash", "params": {"prefix_chunks": 1, "load_factor": 8.0}}
    assert answer.json() == {"default": expected, "models": {}, "routes": {}}
    assert (await admin.get("/admin/policy")).json() == answer.json()
    assert len(set(await workers_of(client, 4))) == 1


async def test_a_change_can_be_for_one_model_or_one_path(client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
    await put(admin, name="prefix-hash", path="/v1/completions")
    assert len(set(await workers_of(client, 4))) == 1
    assert len(set(await workers_of(client, 4, "/v1/chat/completions"))) == 2
    await put(admin, name="round-robin", model=MODEL)
    assert len(set(await workers_of(client, 4))) == 2
    described = (await admin.get("/admin/policy")).json()
    assert described["models"][MODEL]["name"] == described["default"]["name"] == "round-robin"
    assert described["routes"]["/v1/completions"]["name"] == "prefix-hash"


async def test_explain_explains_the_policy_that_decides(admin: httpx.AsyncClient) -> None:
    await put(admin, name="sticky", model=MODEL)
    explained = await admin.post("/admin/explain", json={"model": MODEL, "prompt": STORY})
    assert explained.json()["policy"] == "sticky"
    assert "queue_s" in explained.json()["candidates"][0]


async def test_explain_says_that_a_policy_fails(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(gateway.services.policies.default), "decide", None)
    explained = (await admin.post("/admin/explain", json={"model": MODEL, "prompt": STORY})).json()
    assert (explained["policy"], explained["reason"]) == ("round-robin", "policy_failed")
    assert explained["worker"] in ("worker-0", "worker-1")


MISTAKES: list[tuple[Any, int, str]] = [
    ({"name": "stiky"}, 400, "unknown policy 'stiky'. Did you mean 'sticky'? Known policies: burst-colocation"),
    ({"name": "sticky", "params": {"gap": 1}}, 400, "Parameters it accepts: hit_threshold, max_gap_s"),
    ({"name": "sticky", "params": {"max_gap_s": -1}}, 400, "max_gap_s"),
    ({"params": {}}, 400, "name: is required"),
    ({"name": "sticky", "polcy": 1}, 400, "valid keys: name, params, model, path"),
    ({"name": "sticky", "model": "tiny", "path": "/v1/completions"}, 400, "exclude each other"),
    ({"name": "sticky", "path": "/v1/embeddings"}, 400, "'/v1/messages' or '/v1/responses'"),
    ({"name": "sticky", "model": "tinny"}, 404, "There is no model 'tinny'; models: *, tiny."),
    (["sticky"], 400, "PUT /admin/policy"),
]


async def test_a_wrong_change_is_refused_with_what_would_be_right(admin: httpx.AsyncClient) -> None:
    before = (await admin.get("/admin/policy")).json()
    for change, status, message in MISTAKES:
        answer = await admin.put("/admin/policy", json=change)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
    answer = await admin.put("/admin/policy", content=b"{name: sticky}")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("PUT /admin/policy: Invalid JSON: ")
    assert "sticky" not in message
    assert (await admin.get("/admin/policy")).json() == before


async def test_changes_under_load_lose_no_request(
    gateway: Gateway, client: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    numbers, done = count(), asyncio.Event()
    statuses: list[int] = []

    async def ask_until_done() -> None:
        while not done.is_set():
            number = next(numbers)
            body = {"model": MODEL, "prompt": f"{number % 5} {STORY}", "max_tokens": 4, "stream": number % 2 == 0}
            answer = await client.post("/v1/completions", json=body, timeout=30)
            assert number % 2 or answer.text.endswith("data: [DONE]\n\n")
            statuses.append(answer.status_code)

    async with asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(ask_until_done())
        for name in known_policies():
            seen = len(statuses)
            assert (await put(admin, name=name)).status_code == 200
            await until(lambda seen=seen: len(statuses) >= seen + 8)
        done.set()
    assert set(statuses) == {200}
    assert len(statuses) == next(numbers)
    await until(lambda: gateway.ledger.in_flight == 0)
