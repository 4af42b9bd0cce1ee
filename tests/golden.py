"""What a real vLLM 0.32 answered and published, recorded in ``tests/data/vllm-0.32``."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

DATA = Path(__file__).parent / "data"
BLOCK_SIZE = 32
_RECORDED = DATA / "vllm-0.32"


@dataclass(slots=True, frozen=True)
class Frames:
    """One recorded ZMQ message: its frames, and its payload decoded."""

    raw: tuple[bytes, ...]
    events: list[dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Recorded:
    """One recorded request and the messages that were published while it ran."""

    path: str
    body: dict[str, Any]
    response: dict[str, Any]
    messages: list[Frames]

    @property
    def output_tokens(self) -> int:
        """Tokens that the engine generated."""
        return int(self.response["usage"]["completion_tokens"])

    def output_ids(self, prompt: list[int]) -> list[int]:
        """Return what the engine generated, as far as the events tell: 0 for tokens in no full block."""
        stored = [event for message in self.messages for event in message.events if event["type"] == "BlockStored"]
        tokens = [token for event in stored for token in event["token_ids"]]
        first = stored[0]["token_ids"][:BLOCK_SIZE]
        starts = range(0, len(prompt), BLOCK_SIZE)
        start = next(at for at in starts if prompt[at : at + BLOCK_SIZE] == first[: len(prompt) - at])
        generated = [*prompt[:start], *tokens][len(prompt) :]
        return generated + [0] * (self.output_tokens - len(generated))


def requests() -> list[Recorded]:
    """Chats and completions with shared prefixes and salts, and the ``/tokenize`` and reset around them."""
    recorded = msgspec.json.decode((_RECORDED / "requests_and_events.json").read_bytes())
    messages = [_frames(frames) for frames in recorded["frames"]]
    return [
        Recorded(entry["path"], entry["request"], entry["response"], messages[slice(*entry["event_index"])])
        for entry in recorded["log"]
    ]


def evictions() -> list[Recorded]:
    """Completions that overflow a cache of 64 blocks; before the last one the cache was reset."""
    recorded = msgspec.json.decode((_RECORDED / "eviction_clear_replay.json").read_bytes())
    messages = [_frames(frames) for frames in recorded["frames"]]
    return [
        Recorded(
            "/v1/completions",
            {"prompt": entry["prompt_token_ids"], "max_tokens": entry["usage"]["completion_tokens"]},
            {"usage": entry["usage"]},
            messages[slice(*entry["events"])],
        )
        for entry in recorded["requests"]
    ]


def replay() -> tuple[int, list[tuple[bytes, ...]]]:
    """The first sequence number that was asked for after ``evictions``, and the frames of every answer."""
    recorded = msgspec.json.decode((_RECORDED / "eviction_clear_replay.json").read_bytes())
    return recorded["replay_from_seq"], [tuple(map(base64.b64decode, frames)) for frames in recorded["replay_frames"]]


def _frames(encoded: list[str]) -> Frames:
    raw = tuple(map(base64.b64decode, encoded))
    return Frames(raw, msgspec.msgpack.decode(raw[-1])[1])
