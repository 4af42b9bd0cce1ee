"""Long prompts in pieces on a real engine: it finds what they compute, and answers as it does to whole prompts."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Engine, Fleet, gateway
from tests.e2e.test_passing import essence
from tests.prompt_rig import CHAT, COMPLETIONS, MESSAGES, RESPONSES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PIECE_TOKENS = 512
TIMED_PREFILLS = 16  # of so many streams, answers that are not streamed are held, too
COMMON = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
FOUND = "vllm:prefix_cache_hits_total"


@pytest.fixture(scope="module")
def cutting(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A gateway that cuts prompts for the first engine; what the second one answers is asked of it directly."""
    dispatch = {"piece_tokens": PIECE_TOKENS, "budget_tokens": PIECE_TOKENS}
    with gateway(engines[:1], tmp_path_factory.mktemp("cutting"), dispatch=dispatch) as fleet:
        eventually(lambda: figure(fleet.admin, "kvway_worker_kv_capacity_tokens") > 0)
        yield Fleet(engines, fleet.url, fleet.admin)


@pytest.fixture(scope="module")
def timed(cutting: Fleet) -> Fleet:
    """The same, once it knows how fast its engine is."""
    for number in range(TIMED_PREFILLS):
        ask(cutting.url, COMPLETIONS, f"Stream {number} is short.", stream=True)
    return cutting


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def figure(url: str, name: str) -> float:
    """Return a metric, summed over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def pieces(fleet: Fleet) -> int:
    """Return how many pieces were computed, none of which has failed or missed what it was to go on from."""
    lines = httpx.get(f"{fleet.admin}/metrics", timeout=10).text.splitlines()
    found = [line.split('"') for line in lines if line.startswith("kvway_dispatch_pieces_total{")]
    assert {outcome for _, outcome, _ in found} <= {"completed"}
    return sum(int(float(value[2:])) for _, _, value in found)


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        return COMMON | {"prompt": text} | fields
    if path == RESPONSES:
        return COMMON | {"input": text, "max_output_tokens": 24} | fields
    return COMMON | {"messages": [{"role": "user", "content": text}]} | fields


def post(url: str, path: str, text: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body_of(path, text, **fields), timeout=120)


def ask(url: str, path: str, text: str, **fields: Any) -> httpx.Response:
    response = post(url, path, text, **fields)
    assert response.status_code == 200, response.text
    return response


def story(about: str) -> str:
    """Return some thousand tokens that no other prompt begins with."""
    return " ".join(f"{about}, fact {number}: gear {number} drives shaft {number * 7}." for number in range(200))


def streamed(response: httpx.Response) -> tuple[str, Any]:
    """Return a stream's text and usage."""
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)
    return text, events[-1]["usage"]


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "tenant-a"}], ids=["plain", "salted"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streams_are_those_of_whole_prompts_and_nothing_is_computed_twice(
    path: str, salt: dict[str, str], cutting: Fleet
) -> None:
    one, other = cutting.engines
    text = story(f"{path} {salt}")
    sent, found = pieces(cutting), figure(one.url, FOUND)
    fields = {"stream": True, "stream_options": {"include_usage": True}, **salt}
    in_pieces = ask(cutting.url, path, text, **fields)
    sent = pieces(cutting) - sent
    assert sent >= 4
    # Each piece but the first one has found those before it, and the prompt itself all of them.
    assert figure(one.url, FOUND) - found >= PIECE_TOKENS * sent * (sent + 1) / 2
    assert streamed(in_pieces) == streamed(ask(other.url, path, text, **fields))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_answers_and_usage_are_those_of_whole_prompts_for_every_api(path: str, timed: Fleet) -> None:
    text = story(f"{path} at once")
    sent = pieces(timed)
    in_pieces = ask(timed.url, path, text).json()
    assert pieces(timed) - sent >= 4
    whole = ask(timed.engines[1].url, path, text).json()
    assert essence(in_pieces) == essence(whole)
    assert in_pieces["usage"] == whole["usage"]


def test_the_next_turn_finds_all_and_another_salt_nothing(cutting: Fleet) -> None:
    text = story("A document that is asked about twice")
    fields = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "tenant-a"}
    _, first = streamed(ask(cutting.url, COMPLETIONS, text, **fields))
    sent = pieces(cutting)
    _, second = streamed(ask(cutting.url, COMPLETIONS, f"{text} Why?", **fields))
    assert pieces(cutting) == sent
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > 0.9 * first["prompt_tokens"]
    _, other = streamed(ask(cutting.url, COMPLETIONS, text, **fields | {"cache_salt": "tenant-b"}))
    assert pieces(cutting) > sent
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_short_requests_are_answered_between_the_pieces_of_a_long_one(cutting: Fleet) -> None:
    before = pieces(cutting)
    answered_at: list[int] = []
    with ThreadPoolExecutor(1) as thread, httpx.Client(base_url=cutting.url, timeout=60) as client:
        long = thread.submit(ask, cutting.url, COMPLETIONS, story("Long") * 2, stream=True)
        while not long.done():
            short = body_of(COMPLETIONS, f"Short {len(answered_at)}.", stream=True, max_tokens=1)
            assert client.post(COMPLETIONS, json=short).status_code == 200
            answered_at.append(pieces(cutting))
        assert long.result().text.endswith("data: [DONE]\n\n")
    after = pieces(cutting)
    assert [at for at in answered_at if before < at < after]


def test_a_client_that_leaves_between_pieces_leaves_nothing_at_the_engine(cutting: Fleet) -> None:
    text = story("A long one whose client leaves")
    body = json.dumps(body_of(COMPLETIONS, text, stream=True)).encode()
    url, before = httpx.URL(cutting.url), pieces(cutting)
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: kvway\r\n" % COMPLETIONS.encode())
        client.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        eventually(lambda: pieces(cutting) > before)
    eventually(lambda: figure(cutting.admin, "kvway_in_flight_requests") == 0)
    eventually(lambda: figure(cutting.engines[0].url, "vllm:num_requests_running") == 0)
    left_at = pieces(cutting)
    ask(cutting.url, COMPLETIONS, "A short one.", stream=True)
    assert pieces(cutting) == left_at
    ask(cutting.url, COMPLETIONS, text, stream=True)
    assert pieces(cutting) > left_at, "what was left to compute when the client left"


def test_a_prompt_that_is_too_long_is_refused_without_pieces(cutting: Fleet) -> None:
    sent = pieces(cutting)
    answer = post(cutting.url, COMPLETIONS, story("One that is too long") * 3, stream=True)
    assert answer.status_code == 400
    assert "maximum" in answer.text
    assert pieces(cutting) == sent


def test_an_answer_that_may_be_too_long_is_cut_short_by_the_engine_and_its_prompt_goes_in_pieces(timed: Fleet) -> None:
    sent = pieces(timed)
    ask(timed.url, COMPLETIONS, story("A long one with a long answer"), max_tokens=8000, stop=["e"], ignore_eos=False)
    assert pieces(timed) > sent


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_finds_wrong_in_the_end_its_client_is_told(stream: bool, timed: Fleet) -> None:
    text = story(f"A long one with a parameter that is too large, {stream}")
    answer = post(timed.url, COMPLETIONS, text, stream=stream, logprobs=1000)
    directly = post(timed.engines[0].url, COMPLETIONS, text, stream=stream, logprobs=1000)
    assert (answer.status_code, answer.text) == (directly.status_code, directly.text)
    assert "1000" in answer.text
    eventually(lambda: figure(timed.admin, "kvway_in_flight_requests") == 0)
