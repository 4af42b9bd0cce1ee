"""Token pass-through on a real engine: it takes our ids for its own, and answers as it does without them."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Engine, Fleet
from tests.e2e.corpus import TOOLS
from tests.prompt_rig import CHAT, COMPLETIONS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COMMON = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
QUESTION = {"role": "user", "content": "Which gear drives the <b>seventh</b> shaft? 七番目？ 🙂"}
BRIEF = {"role": "developer", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The seventh shaft is driven by"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [QUESTION]}),
    (
        CHAT,
        {"messages": [BRIEF, QUESTION], "tools": TOOLS, "tool_choice": "none"},
    ),
    (CHAT, {"messages": [QUESTION, ANSWER], "continue_final_message": True, "add_generation_prompt": False}),
    (CHAT, {"messages": [QUESTION, ANSWER, QUESTION], "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": [QUESTION], "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    (CHAT, {"messages": [QUESTION, ANSWER], "echo": True}),
    (COMPLETIONS, {"prompt": "Once upon a time, <s> in a land far away"}),
    (COMPLETIONS, {"prompt": ["One prompt in a list"], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "Say it again", "echo": True}),
]


def send(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{url}{path}", json=COMMON | body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def essence(response: httpx.Response) -> dict[str, Any]:
    """Return an answer without what is new in every one."""
    answer: dict[str, Any] = response.json()
    for name in ("id", "created"):
        answer.pop(name)
    answer["usage"].pop("prompt_tokens_details")
    return answer


@pytest.fixture(scope="module")
def proven(passing_fleet: Fleet) -> Fleet:
    """A gateway to which its engine has confirmed a prompt."""
    send(passing_fleet.url, CHAT, {"messages": [QUESTION]})
    deadline = time.monotonic() + 30
    same = 'kvway_prompt_checks_total{model="tiny",result="same"}'
    while same not in httpx.get(f"{passing_fleet.admin}/metrics").text:
        assert time.monotonic() < deadline, "the engine has not confirmed the prompt"
        time.sleep(0.1)
    return passing_fleet


def test_the_engine_takes_passed_ids_instead_of_rendering_messages(engines: list[Engine]) -> None:
    ids = list(range(100, 148))
    body = {"messages": [QUESTION], "kv_transfer_params": {"prompt_token_ids": ids}, "return_token_ids": True}
    answer = send(engines[0].url, CHAT, body).json()
    assert answer["prompt_token_ids"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_those_of_an_engine_that_tokenizes_itself(path: str, body: dict[str, Any], proven: Fleet) -> None:
    passed = send(proven.url, path, body)
    engine = next(each for each in proven.engines if each.url.endswith(passed.headers["x-kvway-worker"]))
    assert essence(passed) == essence(send(engine.url, path, body))


def test_streams_are_those_of_an_engine_that_tokenizes_itself(proven: Fleet) -> None:
    body = {"messages": [QUESTION], "stream": True, "stream_options": {"include_usage": True}}
    passed = send(proven.url, CHAT, body)
    engine = next(each for each in proven.engines if each.url.endswith(passed.headers["x-kvway-worker"]))
    assert deltas(passed) == deltas(send(engine.url, CHAT, body))


def test_a_prompt_that_is_too_long_is_refused_as_ever(proven: Fleet) -> None:
    body = COMMON | {"messages": [{"role": "user", "content": "gear " * 20_000}]}
    answer = httpx.post(f"{proven.url}{CHAT}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "maximum" in answer.text


def deltas(response: httpx.Response) -> list[str]:
    return [line.partition('"choices"')[2] for line in response.text.splitlines() if line.startswith("data: {")]
