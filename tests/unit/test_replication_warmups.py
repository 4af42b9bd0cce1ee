"""What is kept of prompts, and the requests that are made of it."""

from __future__ import annotations

import msgspec
import pytest

from gateway.config_workers import WorkerConfig
from gateway.fleet.registry import Worker
from gateway.prompt.parsing import parse_request
from gateway.prompt.prompt import Prompt
from gateway.prompt.tokenizer import pack
from gateway.replication.seen import SeenPrompt, SeenPrompts
from gateway.replication.warmup import make_warm_up
from policies.chunks import ChunkHasher

HASHER = ChunkHasher(4)
ROOT = HASHER.root("m", None, "salt")
IDS = list(range(100, 110))
PATH = "/v1/completions"
WORKER = Worker.from_config(WorkerConfig(url="http://w:1"))


def exact(ids: list[int] = IDS, root: bytes = ROOT) -> Prompt:
    return Prompt(len(ids), HASHER.chain(root, pack(ids)), True, [pack(ids)])


def note(
    seen: SeenPrompts, prompt: Prompt, body: bytes = b'{"model": "m", "prompt": "x", "cache_salt": "salt"}'
) -> None:
    seen.note("m", PATH, body, parse_request(PATH, body), prompt)


def test_of_a_prompt_with_token_ids_the_text_is_not_kept() -> None:
    seen = SeenPrompts(1000)
    note(seen, exact())
    [kept] = seen.take()
    assert (kept.model, kept.cache_salt, kept.body) == ("m", "salt", b"")
    assert seen.take() == []


def test_what_is_kept_has_a_bound_which_each_take_renews() -> None:
    seen = SeenPrompts(max_bytes=100)  # two prompts of ten tokens
    for _ in range(2):
        for _ in range(5):
            note(seen, exact())
        assert len(seen.take()) == 2


def test_a_text_without_token_ids_counts_by_its_length() -> None:
    seen = SeenPrompts(max_bytes=100)
    body = msgspec.json.encode({"model": "m", "prompt": "x" * 60})
    for _ in range(2):
        note(seen, Prompt(15, [b"chunk"], False), body)
    assert [kept.body for kept in seen.take()] == [body]


def test_a_prompt_without_chunks_is_not_kept() -> None:
    seen = SeenPrompts(1000)
    note(seen, exact(IDS[:3]))
    assert seen.take() == []


def test_a_warm_up_is_a_completion_of_the_prefix_for_one_token() -> None:
    warm_up = make_warm_up(SeenPrompt("adapter", "salt", "/v1/chat/completions", b"", exact()), 2, HASHER, ROOT)
    assert warm_up is not None
    assert (warm_up.path, warm_up.tokens) == (PATH, 8)
    assert msgspec.json.decode(warm_up.body) == {
        "model": "adapter",
        "prompt": IDS[:8],
        "max_tokens": 1,
        "stream": False,
        "cache_salt": "salt",
    }
    assert (
        warm_up.head_for(WORKER)
        .for_worker(b"w:1", len(warm_up.body))
        .startswith(b"POST /v1/completions HTTP/1.1\r\nhost: w:1\r\n")
    )


def test_token_ids_that_do_not_make_the_chunks_are_not_sent() -> None:
    """Those of an image stand for more than themselves; so do those under another salt."""
    other = HASHER.root("m", None, None)
    assert make_warm_up(SeenPrompt("m", None, PATH, b"", exact()), 2, HASHER, other) is None


def test_without_token_ids_the_request_itself_is_sent_for_one_token() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "tools": [], "temperature": 0.5}
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 50}
    seen = SeenPrompt("m", None, "/v1/chat/completions", msgspec.json.encode(body), Prompt(7, [b"chunk"], False))
    warm_up = make_warm_up(seen, 1, HASHER, ROOT)
    assert warm_up is not None
    assert (warm_up.path, warm_up.tokens) == ("/v1/chat/completions", 7)
    expected = {**fields, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    assert msgspec.json.decode(warm_up.body) == expected


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/messages", {"messages": []}), (PATH, {"prompt": ["a", "b"]}), (PATH, {"prompt": "a", "echo": True})],
)
def test_a_request_of_unknown_cost_is_not_sent_in_place_of_its_prefix(path: str, fields: dict[str, object]) -> None:
    body = msgspec.json.encode({"model": "m", **fields})
    assert make_warm_up(SeenPrompt("m", None, path, body, Prompt(7, [b"chunk"], False)), 1, HASHER, ROOT) is None
