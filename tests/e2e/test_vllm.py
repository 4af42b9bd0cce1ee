"""What only a real engine can prove."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import BLOCK_TOKENS, CHUNK_TOKENS, Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER_TOKENS = 40


def chat(fleet: Fleet, messages: list[dict[str, str]]) -> httpx.Response:
    body = {"model": "tiny", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def predicted(response: httpx.Response) -> int:
    return int(response.headers["x-kvway-predicted-hit-tokens"])


def cached(response: httpx.Response) -> int:
    return int((response.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def answer_of(response: httpx.Response) -> dict[str, Any]:
    return {"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]}


def settled(fleet: Fleet) -> None:
    """Wait until events have arrived and speculative residency (2 s) is gone, so that predictions rest on events."""
    time.sleep(2.5)


@pytest.mark.parametrize("session", range(4))
def test_the_second_turn_goes_to_the_first_turns_worker_and_predicted_equals_reported_within_a_chunk(
    fleet: Fleet, session: int
) -> None:
    opening = " ".join(
        f"Fact {session}-{number}: gear {number} drives shaft {number + session}." for number in range(80)
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{opening} Which shaft does gear 7 drive?"}]
    first = chat(fleet, messages)
    settled(fleet)

    messages += [answer_of(first), {"role": "user", "content": "And gear 12?"}]
    second = chat(fleet, messages)

    assert second.headers["x-kvway-worker"] == first.headers["x-kvway-worker"]
    assert cached(second) > 500
    assert abs(predicted(second) - cached(second)) <= CHUNK_TOKENS


def test_first_turns_of_different_sessions_use_both_workers(fleet: Fleet) -> None:
    openings = [f"Session {number}. " + f"Topic {number * 31} has its own long story. " * 60 for number in range(8)]
    served = {chat(fleet, [{"role": "user", "content": text}]).headers["x-kvway-worker"] for text in openings}
    assert len(served) == 2


def test_a_salted_prompt_is_predicted_only_for_its_own_salt(fleet: Fleet) -> None:
    prompt = "A shared document about bridges. " * 60
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}

    def send(salt: str) -> httpx.Response:
        response = httpx.post(f"{fleet.url}/v1/completions", json=body | {"cache_salt": salt}, timeout=60)
        assert response.status_code == 200, response.text
        return response

    send("tenant-a")
    settled(fleet)
    other, same = send("tenant-b"), send("tenant-a")
    assert predicted(other) == cached(other) == 0
    assert predicted(same) > 0
    assert abs(predicted(same) - cached(same)) <= CHUNK_TOKENS


def test_a_reset_prefix_cache_is_noticed_with_the_next_event(fleet: Fleet) -> None:
    """The engine announces a reset with its next batch of events, so one more request makes it known."""
    messages = [{"role": "user", "content": "The reset story. " * 120}]
    first = chat(fleet, messages)
    settled(fleet)
    worker = first.headers["x-kvway-worker"]
    engine = next(engine for engine in fleet.engines if engine.url.endswith(worker))
    assert httpx.post(f"{engine.url}/reset_prefix_cache", timeout=10).status_code == 200
    httpx.post(
        f"{engine.url}/v1/completions", json={"model": "tiny", "prompt": "x " * 200, "max_tokens": 1}, timeout=60
    )
    settled(fleet)
    again = chat(fleet, messages)
    assert predicted(again) == cached(again) == 0


def test_a_prompt_is_prefetched_to_a_named_engine_and_cleared_from_it(fleet: Fleet) -> None:
    text = " ".join(f"Clause {number} of the lease is about door {number * 7}." for number in range(120))
    body = {"model": "tiny", "prompt": text, "max_tokens": 1}
    workers = [worker["name"] for worker in httpx.get(f"{fleet.admin}/admin/workers").json()]

    def control(verb: str, content: Any = None, **parameters: str) -> Any:
        answer = httpx.post(f"{fleet.admin}/admin/cache/{verb}", params=parameters, json=content, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def held() -> list[int]:
        return [row["hit_tokens"] for row in control("lookup", body)["workers"]]

    done = control("prefetch", body, worker=workers[1])
    settled(fleet)
    assert held() == [0, done["tokens"]]
    assert control("prefetch", body, worker=workers[1])["cached_tokens"] >= done["tokens"] - BLOCK_TOKENS
    assert {(row["engine"], row["index"]) for row in control("clear")["workers"]} == {("cleared", "cleared")}
    assert held() == [0, 0]
    assert control("prefetch", body, worker=workers[1])["cached_tokens"] == 0
    settled(fleet)
    assert held() == [0, done["tokens"]]
