"""What one worker says of itself over HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec

from gateway.check.findings import Notebook
from gateway.check.mending import Kind, block_size_flag, cached_tokens_flag, prefix_caching_flag
from gateway.config import PromptConfig, WorkerConfig
from gateway.events.sources import EventSource, parse_sglang_sources, parse_vllm_sources
from gateway.fleet.credentials import credentials
from gateway.fleet.metrics import parse_metrics
from gateway.fleet.models import base_models

_MAX_SKEW_S: Final = 2.0  # the header `date` has whole seconds
_NO_PREFIX_CACHING: Final = re.compile(rb'^vllm:cache_config_info\{[^\n]*enable_prefix_caching="False"', re.MULTILINE)


class Silent(Exception):
    """A worker did not answer, or with an error; the message says which."""


@dataclass(slots=True)
class Engine:
    """A worker as it answers.

    Attributes:
        config: its entry in the configuration.
        kind: which engine it looks like.
        models: names it serves → base model.
        max_tokens: longest prompt and output together of a base model, where it says so.
        block_size: tokens per KV block; None where it does not say.
        sources: where it says that it publishes KV events; None where it does not say.
    """

    config: WorkerConfig
    client: httpx.AsyncClient
    timeout_s: float
    kind: Kind = "vllm"
    models: dict[str, str] = field(default_factory=dict)
    max_tokens: dict[str, int] = field(default_factory=dict)
    block_size: int | None = None
    sources: list[EventSource] | None = None

    async def get(self, path: str) -> httpx.Response:
        """Return the answer to ``GET path``, whatever its status.

        Raises:
            Silent: there is none.
        """
        return await self._ask("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that ``POST path`` answers.

        Raises:
            Silent: it answers something else.
        """
        answer = await self._ask("POST", path, msgspec.json.encode(body))
        if answer.status_code != 200:
            raise Silent(f"{path} answers {answer.status_code}: {answer.text[:200]}")
        try:
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Silent(f"{path} answers no JSON object: {error}") from None

    async def _ask(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        headers = {"content-type": "application/json", **credentials(self.config)}
        url = self.config.url + path
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.client.request(method, url, content=content, headers=headers)
        except TimeoutError:
            raise Silent(f"{path} does not answer within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise Silent(f"{path} fails: {error or type(error).__name__}") from None


async def look_at_engine(
    engine: Engine, notes: Notebook, prompt: PromptConfig, health_path: str, clock: Callable[[], float] = time.time
) -> bool:
    """Fill in ``engine`` and note what is wrong with it; False if it is of no use to look any further.

    Args:
        engine: with nothing but its configuration.
        notes: where findings go.
        prompt: what kvway makes of prompts.
        health_path: of the probe.
        clock: Unix seconds.
    """
    try:
        health = await engine.get(health_path)
    except Silent as error:
        mend = f"start the worker, or correct its url: {engine.config.url} in workers:"
        notes.problem("reachable", f"{engine.config.url}{error}", mend)
        return False
    if health.status_code != 200:
        mend = "see the engine's log; if it has no such path, set health.path"
        notes.problem("reachable", f"{engine.config.url}{health_path} answers {health.status_code}", mend)
        return False
    notes.ok("reachable", f"{engine.config.url} answers")
    _look_at_clock(health, notes, clock)
    if not await _look_at_models(engine, notes):
        return False
    await _look_at_metrics(engine, notes, prompt.chunk_tokens)
    await _look_for_sources(engine)
    return True


def _look_at_clock(answer: httpx.Response, notes: Notebook, clock: Callable[[], float]) -> None:
    try:
        skew_s = parsedate_to_datetime(answer.headers.get("date", "")).timestamp() - clock()
    except ValueError:
        return  # the times in its events will tell
    note_clock(notes, skew_s)


def note_clock(notes: Notebook, skew_s: float) -> None:
    """Note how far a worker's clock is ahead of ours, in seconds."""
    if abs(skew_s) > _MAX_SKEW_S:
        way = "ahead of" if skew_s > 0 else "behind"
        message = f"its clock is {abs(skew_s):.1f} s {way} the one here, so that the lag of its events cannot be told"
        notes.problem("clock", message, "run an NTP client on both machines")
    else:
        notes.ok("clock", f"within {_MAX_SKEW_S:g} s of the one here")


async def _look_at_models(engine: Engine, notes: Notebook) -> bool:
    configured = engine.config.models
    try:
        answer = await engine.get("/v1/models")
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            key = engine.config.api_key_file
            what = "no key is sent" if key is None else f"not the one in {key}"
            mend = "set api_key_file of the worker to a file with the engine's --api-key"
            notes.problem("api_key", f"the engine asks for an API key, {what}", mend)
            return False
        cards = msgspec.json.decode(answer.content, type=dict[str, Any]).get("data")
        cards = [card for card in cards if isinstance(card.get("id"), str)] if isinstance(cards, list) else []
    except (Silent, msgspec.MsgspecError, UnicodeDecodeError, AttributeError) as error:
        notes.problem("models", f"/v1/models cannot be read: {error}", f"is {engine.config.url} an inference engine?")
        return False
    engine.models = base_models(cards)
    engine.max_tokens = {
        card["id"]: card["max_model_len"] for card in cards if isinstance(card.get("max_model_len"), int)
    }
    if any(card.get("owned_by") == "sglang" for card in cards):
        engine.kind = "sglang"
    missing = [name for name in configured if name not in engine.models]
    if missing or not engine.models:
        serves = ", ".join(engine.models) or "nothing"
        what = f"not {', '.join(missing)}, which is configured" if missing else "so that it gets no requests"
        mend = "correct models: of the worker, or leave it out; or name the model with --served-model-name"
        notes.problem("models", f"it serves {serves}, {what}", mend)
    else:
        notes.ok("models", f"it serves {', '.join(engine.models)}")
    engine.models = {name: base for name, base in engine.models.items() if not configured or name in configured}
    return bool(engine.models)


async def _look_at_metrics(engine: Engine, notes: Notebook, chunk_tokens: int) -> None:
    try:
        answer = await engine.get("/metrics")
        if answer.status_code != 200:
            raise Silent(f"/metrics answers {answer.status_code}")
    except Silent as error:
        mend = "start SGLang with --enable-metrics" if engine.kind == "sglang" else "leave out --disable-log-stats"
        notes.problem("metrics", f"{error}, so that its load and the size of its cache are not known", mend)
        return
    text = answer.content
    if b"\nsglang:" in text:
        engine.kind = "sglang"
    metrics = parse_metrics(text)
    engine.block_size = metrics.block_size
    if metrics.kv_capacity_tokens is None and not engine.config.kv_capacity_tokens:
        mend = "set kv_capacity_tokens of the worker"
        notes.note("metrics", "they do not say how large its KV cache is", mend)
    else:
        notes.ok("metrics", f"KV cache of {metrics.kv_capacity_tokens or engine.config.kv_capacity_tokens:,} tokens")
    if _NO_PREFIX_CACHING.search(text):
        flag = prefix_caching_flag(engine.kind)
        notes.problem("prefix_caching", "the engine keeps no prefixes: enable_prefix_caching is False", flag)
    note_block_size(engine, notes, chunk_tokens)


def note_block_size(engine: Engine, notes: Notebook, chunk_tokens: int) -> None:
    """Note whether the engine's blocks fit into our chunks."""
    size = engine.block_size
    if size is None:
        notes.note("block_size", "the engine does not say how many tokens a block has")
    elif chunk_tokens % size:
        fitting = -(-chunk_tokens // size) * size
        message = f"a chunk of {chunk_tokens} tokens is no multiple of the engine's block of {size}"
        flag = block_size_flag(engine.kind, 16)
        notes.problem("block_size", message, f"set prompt.chunk_tokens to {fitting}, or start the engine with {flag}")
    else:
        notes.ok("block_size", f"{size} tokens, {chunk_tokens // size} blocks to a chunk")


async def _look_for_sources(engine: Engine) -> None:
    path, read = (
        ("/server_info", parse_sglang_sources) if engine.kind == "sglang" else ("/kv_event_sources", parse_vllm_sources)
    )
    with suppress(Silent, ValueError):  # msgspec's errors are ValueErrors
        answer = await engine.get(path)
        if answer.status_code == 200:
            engine.sources = read(answer.content, httpx.URL(engine.config.url).host)


def note_report(engine: Engine, notes: Notebook, cached: int | None) -> None:
    """Note whether the engine reports what it had cached of a prompt."""
    if cached is None:
        message = "the engine does not report cached_tokens, so that predictions cannot be held against it"
        notes.problem("usage", message, f"start the engine with {cached_tokens_flag(engine.kind)}")
    else:
        notes.ok("usage", "the engine reports cached_tokens")
