"""The self-check, on real sockets: workers say what they make of a prompt, and whoever differs is noticed."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config import Config, SelfCheckConfig
from gateway.prompt import engine as engine_module
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.selfcheck import DIFFERENT, SAME, UNANSWERED, SelfCheck, date_turns, first_difference
from gateway.prompt.tokenizer import pack
from sim.server import SimWorker
from sim.settings import WorkerSettings
from tests.gateway_rig import fleet
from tests.integration.engine import HANG, Engine, until
from tests.prompt_rig import CHAT, COMPLETIONS, RESPONSES, TINY, candidates, ids_of, prompt_of

WRONG = "{% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}<|im_end|>{% endfor %}"
SECRET = "the launch code is heliotrope"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
async def worker():
    async with SimWorker(WorkerSettings(model="tiny", tokenizer=TINY)) as running:
        yield running


@pytest.fixture(autouse=True)
def daytime(monkeypatch):
    monkeypatch.setattr("gateway.prompt.selfcheck.date_turns", lambda now: False)


def pipeline_of(template: Path | None = None, **self_check: Any) -> PromptPipeline:
    model = {"tokenizer": str(TINY)} | ({} if template is None else {"chat_template": str(template)})
    return PromptPipeline(
        Config.model_validate({"models": {"*": model}, "prompt": {"self_check": {"rate": 1, **self_check}}})
    )


def wrong_template(folder: Path) -> Path:
    file = folder / "wrong.jinja"
    file.write_text(WRONG)
    return file


async def serve(pipeline: PromptPipeline, url: str, path: str, body: dict[str, Any]) -> Any:
    """Do what the relay does with a request, and wait for the check."""
    raw, chosen = json.dumps(body).encode(), candidates(url=url)
    request = pipeline.parse(path, raw)
    prompt = await pipeline.prompt(request, chosen)
    checked = pipeline.checks.results.total()
    pipeline.check(path, raw, request, prompt, chosen)
    if prompt.tokenized:
        await until(lambda: pipeline.checks.results.total() > checked)
    return prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        (CHAT, BODY | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
        (COMPLETIONS, {"model": "tiny", "prompt": "def f(x):\n    return x\n"}),
    ],
)
async def test_prompts_that_are_the_engines_are_found_the_same(path, body, worker):
    pipeline = pipeline_of()
    await serve(pipeline, worker.url, path, body)
    assert pipeline.checks.results == {("tiny", SAME): 1}
    assert pipeline.checks.proven("tiny")
    await pipeline.close()


async def test_a_model_that_differs_is_left_to_its_engine(worker, tmp_path, caplog):
    wrong, right = pipeline_of(wrong_template(tmp_path)), pipeline_of()
    ours = ids_of(await serve(wrong, worker.url, CHAT, BODY))
    theirs = ids_of(await prompt_of(right, CHAT, BODY))
    assert wrong.checks.results == {("tiny", DIFFERENT): 1}
    assert not wrong.checks.proven("tiny")

    again = await serve(wrong, worker.url, CHAT, BODY)
    assert ids_of(again) == theirs
    assert (again.exact, again.tokenized) == (True, False)
    assert wrong.checks.results.total() == 1  # the engine is not held against itself

    at = next(at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    assert f"token {at} of a prompt is {ours[at]} here and {theirs[at]} on worker 127.0.0.1" in caplog.text
    assert "heliotrope" not in caplog.text
    for pipeline in (wrong, right):
        await pipeline.close()


async def test_nothing_is_held_against_a_model_while_the_date_turns(worker, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.prompt.selfcheck.date_turns", lambda now: True)
    pipeline = pipeline_of(wrong_template(tmp_path))
    await serve(pipeline, worker.url, CHAT, BODY)
    assert pipeline.checks.results == {("tiny", UNANSWERED): 1}
    assert (await prompt_of(pipeline, CHAT, BODY)).tokenized
    await pipeline.close()


@pytest.mark.parametrize(
    ("time", "turns"), [("23:58:59", False), ("23:59:01", True), ("00:00:59", True), ("00:01:01", False)]
)
def test_the_date_turns_at_midnight(time, turns):
    assert date_turns(datetime.fromisoformat(f"2026-03-01T{time}")) is turns


async def test_tool_calls_of_responses_are_not_held_against_tokenize(worker):
    """It would write a called function's arguments before its name, which the engine does not when it runs them."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    pipeline = pipeline_of()
    await serve(pipeline, worker.url, RESPONSES, {"model": "tiny", "input": [{"role": "user", "content": "x"}, call]})
    assert pipeline.checks.results == {("tiny", UNANSWERED): 1}
    await pipeline.close()


async def test_vllms_own_rendering_is_preferred_and_gets_the_body_as_it_came(caplog):
    caplog.set_level(logging.INFO, "kvway")
    pipeline = pipeline_of()
    ids = ids_of(await prompt_of(pipeline, CHAT, BODY))
    answers = {
        f"{CHAT}/render": json.dumps({"request_id": "x", "token_ids": ids}).encode(),
        f"{COMPLETIONS}/render": json.dumps([{"token_ids": [1, 2]}, {"token_ids": [3]}]).encode(),
    }
    async with Engine(answers) as engine:
        await serve(pipeline, engine.url, CHAT, BODY)
        await serve(pipeline, engine.url, COMPLETIONS, {"prompt": "Hello"})
    assert engine.asked == [f"{CHAT}/render", f"{COMPLETIONS}/render"]
    assert pipeline.checks.results == {("tiny", SAME): 1, ("tiny", DIFFERENT): 1}
    await pipeline.close()


@pytest.mark.parametrize("answer", [(500, b"{}"), (404, b""), b"{}", b"[]", b"["])
async def test_an_engine_that_does_not_tell_proves_nothing(answer):
    pipeline = pipeline_of()
    async with Engine({f"{CHAT}/render": answer}) as engine:
        await serve(pipeline, engine.url, CHAT, BODY)
    assert pipeline.checks.results == {("tiny", UNANSWERED): 1}
    assert not pipeline.checks.proven("tiny")
    assert (await prompt_of(pipeline, CHAT, BODY)).tokenized
    await pipeline.close()


async def test_a_request_does_not_wait_for_its_check(monkeypatch):
    monkeypatch.setattr(engine_module, "RENDER_TIMEOUT_S", 0.2)
    pipeline = pipeline_of()
    async with Engine({f"{CHAT}/render": HANG}) as engine:
        chosen, raw = candidates(url=engine.url), json.dumps(BODY).encode()
        request = pipeline.parse(CHAT, raw)
        prompt = await pipeline.prompt(request, chosen)
        pipeline.check(CHAT, raw, request, prompt, chosen)  # returns at once
        await until(lambda: engine.asked)
        assert not pipeline.checks.results
    await until(lambda: pipeline.checks.results)
    await pipeline.close()


async def test_token_ids_of_the_client_are_not_checked(worker):
    pipeline = pipeline_of()
    prompt = await serve(pipeline, worker.url, COMPLETIONS, {"prompt": [1, 2, 3]})
    assert (prompt.exact, prompt.tokenized) == (True, False)
    await pipeline.close()


def sampled(prompts: int, **config: Any) -> list[int]:
    checks = SelfCheck(SelfCheckConfig(**config), None, print)  # type: ignore[arg-type]
    return [number for number in range(prompts) if checks.due("tiny")]


def test_the_first_prompt_is_checked_and_then_the_share_asked_for():
    numbers = sampled(100_000, rate=0.01, max_per_minute=10**6)
    assert numbers[0] == 0
    assert all(50 <= later - earlier <= 150 for earlier, later in pairwise(numbers))
    assert 900 < len(numbers) < 1100


def test_checks_are_bounded_in_a_minute_and_can_be_switched_off():
    assert len(sampled(1000, rate=1, max_per_minute=3)) == 3
    assert sampled(1000, rate=0) == []


def test_a_first_prompt_that_comes_in_a_full_minute_is_made_up_for(monkeypatch):
    now = 100.0
    monkeypatch.setattr("gateway.prompt.selfcheck.monotonic", lambda: now)
    config = SelfCheckConfig(rate=0.001, max_per_minute=1)
    checks = SelfCheck(config, None, print)  # type: ignore[arg-type]
    assert checks.due("one")
    assert not checks.due("other")
    now += 60
    assert checks.due("other")


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1, 2, 3], [1, 7, 3], (1, 2, 7)),
        ([1, 2], [1, 2, 3], (2, "nothing", 3)),
        ([1, 2], [], (0, 1, "nothing")),
    ],
)
def test_the_first_differing_token_is_found(ours, theirs, difference):
    assert first_difference(pack(ours), pack(theirs)) == difference


@pytest.mark.slow
async def test_operators_see_checks_and_models_left_to_the_engine(tmp_path):
    models = {"tiny": {"tokenizer": str(TINY), "chat_template": str(wrong_template(tmp_path))}}
    async with fleet(1, models=models) as gateway, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{gateway.port}{CHAT}"
        metrics = partial(client.get, f"http://127.0.0.1:{gateway.admin_port}/metrics")
        assert (await client.post(url, json=BODY | {"max_tokens": 2})).status_code == 200
        async with asyncio.timeout(10):
            while 'kvway_prompt_engine_side{model="tiny"} 1.0' not in (text := (await metrics()).text):
                await asyncio.sleep(0.01)
        assert 'kvway_prompt_checks_total{model="tiny",result="different"} 1' in text
        assert (await client.post(url, json=BODY | {"max_tokens": 2})).status_code == 200
