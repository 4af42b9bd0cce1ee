"""KV of conversations that decode workers keep, for the prefill of their next turn to pull instead of computing it.

vLLM's NixlConnector can do so in both directions (``bidirectional_kv_xfer``): the answer of a request that was handed
over says where its KV lies, and a prefill request that brings this on has the prefill worker pull it. The engine takes
the new prompt's word for beginning with the same tokens: where it does not, answers are wrong without a sign
(vllm#43094). So only what is known to be the same is offered, the whole chunks of the prompt before, and only where the
engine has counted as many tokens in it as we have.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any, Final

import msgspec

from gateway.fleet.registry import Worker
from policies.base import RoutingRequest

_MAX_BYTES: Final = 64 * 2**20  # of all turns' parameters; those of 100,000 tokens are some 40 kB
_KEY: Final = b'"kv_transfer_params"'  # generated text cannot contain it unescaped
_read = json.JSONDecoder().raw_decode


class Turn(msgspec.Struct, frozen=True):
    """One turn whose KV is kept.

    Attributes:
        worker: where.
        params: what a prefill request brings on to have it pulled.
        tokens: how much of it may be pulled.
        until: when it is given up, monotonic seconds.
    """

    worker: Worker
    params: bytes
    tokens: int
    until: float


class Turns:
    """The turns that decode workers keep, by the last whole chunk of their prompts.

    Args:
        keep_s: for how long they do; 0: not at all.

    Attributes:
        enabled: whether they do.
        outcomes: how many turns were ``kept``, ``pulled``, ``failed`` to be pulled, or given up (``expired``).
    """

    def __init__(self, keep_s: float) -> None:
        self.enabled = keep_s > 0
        self.outcomes: Counter[str] = Counter()
        self._keep_s = keep_s
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()  # the oldest first
        self._bytes = 0

    def keep(
        self, request: RoutingRequest, counted_tokens: int | None, worker: Worker, params: dict[str, Any], now: float
    ) -> None:
        """Note that a request's KV is kept.

        Args:
            request: the request.
            counted_tokens: how long the engine says that its prompt is.
            worker: the decode worker that keeps it.
            params: the ``kv_transfer_params`` of its answer.
            now: monotonic seconds.
        """
        tokens = len(request.chunks) * request.chunk_tokens
        offered = _limited(params, tokens, worker.block_size) if counted_tokens == request.prompt_tokens else None
        if offered is None:
            return
        self._expire(now)
        key = request.chunks[-1]
        self._drop(key)
        self._turns[key] = Turn(worker, offered, tokens, now + self._keep_s)
        self._bytes += len(offered)
        self.outcomes["kept"] += 1

    def find(self, request: RoutingRequest, now: float) -> Turn | None:
        """Return the longest kept turn that a request goes on from."""
        self._expire(now)
        if not self._turns:
            return None
        return next((turn for chunk in reversed(request.chunks) if (turn := self._turns.get(chunk))), None)

    def take(self, turn: Turn) -> None:
        """A turn is being pulled: engines give each away once."""
        for key in [key for key, kept in self._turns.items() if kept is turn]:
            self._drop(key)

    def leave(self, worker: Worker) -> None:
        """A worker is gone, with what it kept."""
        for key in [key for key, turn in self._turns.items() if turn.worker is worker]:
            self._drop(key)
            self.outcomes["expired"] += 1

    def _expire(self, now: float) -> None:
        while self._turns:
            key, turn = next(iter(self._turns.items()))
            if turn.until > now and self._bytes <= _MAX_BYTES:
                return
            self._drop(key)
            self.outcomes["expired"] += 1

    def _drop(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._bytes -= len(turn.params)


class ParamsReader:
    """Finds the ``kv_transfer_params`` in an answer that passes by."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, payload: bytes) -> None:
        """Look at the next bytes of the body."""
        kept = self._kept + payload
        at = kept.rfind(_KEY)
        if at < 0:
            self._kept = kept[1 - len(_KEY) :]
        else:
            self._kept = kept[at:] if len(kept) - at <= _MAX_BYTES else b""

    def params(self) -> dict[str, Any] | None:
        """Return them, None where there were none."""
        if not self._kept.startswith(_KEY):
            return None
        value = self._kept.removeprefix(_KEY).lstrip().removeprefix(b":").lstrip()
        try:
            params, _ = _read(value.decode())
        except (ValueError, RecursionError):
            return None
        return params if isinstance(params, dict) else None


def _limited(params: dict[str, Any], tokens: int, block_size: int) -> bytes | None:
    """Return parameters that have the first ``tokens`` tokens pulled; None where they cannot be cut so.

    They say how many tokens are kept, in which blocks by KV cache group. Blocks of several groups (sliding windows)
    and of several ranks (decode context parallelism) are not numbered from the first token on.
    """
    groups, kept = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if params.get("do_remote_decode") is not True or not isinstance(groups, list) or len(groups) != 1:
        return None
    if not block_size or tokens % block_size or type(kept) is not int or not 0 < tokens <= kept:
        return None
    if not isinstance(groups[0], list) or len(groups[0]) != -(-kept // block_size):
        return None
    blocks = groups[0][: tokens // block_size]
    return msgspec.json.encode(params | {"remote_block_ids": [blocks], "remote_num_tokens": tokens})
