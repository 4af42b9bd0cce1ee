from __future__ import annotations

import json

import pytest

from gateway.relay.report import asking_for_report


@pytest.mark.parametrize("body", [b'{"model":"m","prompt":"{"}', b' \n{ "prompt": [1] }'])
def test_a_body_asks_for_a_report_and_is_otherwise_the_same(body: bytes) -> None:
    asked = json.loads(asking_for_report(body))
    assert asked.pop("vllm_xargs") == {"kv_cache_report_mode": "full"}
    assert asked == json.loads(body)


def test_a_body_with_arguments_of_its_own_keeps_them() -> None:
    body = b'{"vllm_xargs":{"top_n_sigma":1},"prompt":"x"}'
    assert asking_for_report(body) == body
