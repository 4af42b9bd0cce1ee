"""Bodies with token ids in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config import Config
from gateway.prompt.passing import with_token_ids
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.tokenizer import pack
from tests.prompt_rig import TINY, ids_of, prompt_of

IDS = [1, 70_000, 3]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hä?"}], "stream": True, "temperature": 0.1}
COMPLETION = {"model": "tiny", "prompt": "Once", "max_tokens": 5}


def passed(body: dict[str, Any]) -> Any:
    made = with_token_ids(json.dumps(body).encode(), pack(IDS))
    return None if made is None else json.loads(made)


@pytest.mark.parametrize("body", [CHAT, {"model": "tiny", "input": "Hä?", "prompt": None}])
def test_a_chat_keeps_all_its_fields_and_carries_ids(body):
    assert passed(body) == body | {"kv_transfer_params": {"prompt_token_ids": IDS}}


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_a_completion_has_ids_in_place_of_its_text(prompt):
    assert passed(COMPLETION | {"prompt": prompt, "echo": False}) == COMPLETION | {"prompt": IDS, "echo": False}


def test_of_equal_keys_the_last_one_is_kept_as_the_engine_would():
    body = b'{"messages": [], "n": 1, "n": 2}'
    assert json.loads(with_token_ids(body, pack(IDS)) or b"")["n"] == 2


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True},
        {"echo": 1},
        {"return_prompt_text": True},
        {"enable_response_messages": True},
        {"kv_transfer_params": {"do_remote_decode": True}},
    ],
)
@pytest.mark.parametrize("body", [CHAT, COMPLETION])
def test_what_the_ids_would_disturb_is_sent_as_it_came(body, more):
    assert passed(body | more) is None


def test_without_ids_and_without_readable_json_nothing_is_made():
    assert with_token_ids(json.dumps(CHAT).encode(), b"") is None
    assert with_token_ids(b'{"messages": [], "temperature": NaN}', pack(IDS)) is None


async def test_no_chat_gets_the_ids_of_another_with_the_same_hashes(monkeypatch):
    monkeypatch.setattr("policies.chunks._digest", lambda data, seed: bytes(16))
    bodies = [{"messages": [{"role": "user", "content": letter * 10_000}]} for letter in "ab"]
    models = {"*": {"tokenizer": str(TINY), "pass_token_ids": True}}
    pipeline = PromptPipeline(Config.model_validate({"models": models}))
    one, other = [ids_of(await prompt_of(pipeline, "/v1/chat/completions", body)) for body in bodies]
    assert one != other
    await pipeline.close()


def test_ids_are_not_passed_on_without_a_self_check():
    with pytest.raises(ValueError, match=r"self_check\.rate must be above 0"):
        Config.model_validate({"models": {"a": {"pass_token_ids": True}}, "prompt": {"self_check": {"rate": 0}}})
