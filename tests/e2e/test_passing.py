"""Token pass-through on a real engine: it takes our ids for its own, and answers as it does without them."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Engine, Fleet
from tests.e2e.corpus import TOOLS
from tests.prompt_rig import CHAT, COMPLETIONS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NEW_EACH_TIME = {"id", "created", "created_at", "completed_at", "request_id"} | {
    "prompt_tokens_details",
    "input_tokens_details",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "input_tokens",  # of Messages: without those that were cached
    "kv_transfer_params",
}
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
    (CHAT, {"messages": [QUESTION], "return_prompt_text": True}),
    ("/v1/messages", {"system": "Be brief.", "messages": [QUESTION, ANSWER, QUESTION]}),
    ("/v1/responses", {"instructions": "Be brief.", "input": QUESTION["content"], "max_output_tokens": 24}),
    ("/v1/responses", {"input": "Say it", "max_output_tokens": 8, "enable_response_messages": True}),
    (COMPLETIONS, {"prompt": "Once upon a time, <s> in a land far away"}),
    (COMPLETIONS, {"prompt": ["One prompt in a list"], "logprobs": 1}),
    (COMPLETIONS, {"prompt": "Say it again", "echo": True}),
]


def send(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{url}{path}", json=COMMON | body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def essence(answer: Any) -> Any:
    """Return an answer without what is new in every one: names, times, and what was cached."""
    if isinstance(answer, list):
        return [essence(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    return {name: essence(value) for name, value in answer.items() if name not in NEW_EACH_TIME}


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


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        (CHAT, {"messages": [QUESTION]}, ["prompt_tokens"]),
        ("/v1/responses", {"input": QUESTION["content"], "max_output_tokens": 4}, ["input_tokens"]),
        (
            "/v1/messages",
            {"messages": [QUESTION]},
            ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"],
        ),
    ],
)
def test_the_engine_takes_passed_ids_instead_of_rendering(
    path: str, body: dict[str, Any], counted: list[str], engines: list[Engine]
) -> None:
    ids = list(range(100, 177))
    usage = send(engines[0].url, path, body | {"kv_transfer_params": {"prompt_token_ids": ids}}).json()["usage"]
    assert sum(usage[name] or 0 for name in counted) == len(ids)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_those_of_an_engine_that_tokenizes_itself(path: str, body: dict[str, Any], proven: Fleet) -> None:
    passed = send(proven.url, path, body)
    engine = next(each for each in proven.engines if each.url.endswith(passed.headers["x-kvway-worker"]))
    assert essence(passed.json()) == essence(send(engine.url, path, body).json())


def test_streams_are_those_of_an_engine_that_tokenizes_itself(proven: Fleet) -> None:
    body = {"messages": [QUESTION], "stream": True, "stream_options": {"include_usage": True}}
    passed = send(proven.url, CHAT, body)
    engine = next(each for each in proven.engines if each.url.endswith(passed.headers["x-kvway-worker"]))
    assert told(passed) == told(send(engine.url, CHAT, body))


def test_a_prompt_that_is_too_long_is_refused_as_ever(proven: Fleet) -> None:
    body = COMMON | {"messages": [{"role": "user", "content": "gear " * 20_000}]}
    answer = httpx.post(f"{proven.url}{CHAT}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "maximum" in answer.text


def told(response: httpx.Response) -> tuple[str, list[str], Any]:
    """Return a stream's text, how it ended, and the tokens counted; how it is cut into events is a matter of time."""
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [end for choice in choices if (end := choice["finish_reason"])], essence(events[-1]["usage"])
