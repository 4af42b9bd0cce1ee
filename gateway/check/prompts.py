"""Whether kvway makes the same tokens of a prompt as the engine, and whether the engine finds them again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from gateway.check.engine import Engine, Silent, note_report
from gateway.check.findings import Notebook
from gateway.check.mending import prefix_caching_flag
from gateway.config import Config
from gateway.errors import GatewayError
from gateway.fleet.registry import Candidates, Registry, State, Worker
from gateway.prompt.engine import EngineError
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.prompt import Prompt
from policies.chunks import TOKEN_BYTES

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_TEXT: Final = "Naïve café, 北京 — 1 234 567 items:\n\n\tdef f(x): return x ** 2  # fine\n🙂 <b>bold</b>  two  spaces "
_SYSTEM: Final = {"role": "system", "content": "Answer briefly."}
_TURNS: Final = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "It returns the square."},
    {"role": "user", "content": "And of 12?"},
]
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SAMPLES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "a text": (COMPLETIONS, {"prompt": _TEXT}),
    "a chat": (CHAT, {"messages": _TURNS[:1]}),
    "a chat of several turns with a system prompt": (CHAT, {"messages": [_SYSTEM, *_TURNS]}),
    "a chat with a tool": (CHAT, {"messages": _TURNS[:1], "tools": [_TOOL]}),
}
_WORDS: Final = ("river", "stone", "cloud", "maple", "ember", "violet", "harbor", "winter", "copper", "meadow")
_MIN_WORDS: Final = 32


class Prompts:
    """Makes prompts for one worker as the gateway would.

    Args:
        config: the gateway's.
        pipeline: made of it.
        engine: looked at already.
        model: name of a model that it serves.
    """

    def __init__(self, config: Config, pipeline: PromptPipeline, engine: Engine, model: str) -> None:
        self.model = model
        self.source = config.model_config_for(engine.models[model])
        self._pipeline = pipeline
        self._candidates = _candidates(engine, model)

    async def engine_ids(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the packed ids that the engine makes of a request.

        Raises:
            EngineError: it does not tell.
        """
        return await self._pipeline.engine_ids(path, self._encoded(body), self._candidates)

    async def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """Return what the gateway makes of a request.

        Raises:
            GatewayError: it would refuse it.
        """
        return await self._pipeline.prompt(self._pipeline.parse(path, self._encoded(body)), self._candidates)

    def _encoded(self, body: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({"model": self.model, **body})


def _candidates(engine: Engine, model: str) -> Candidates:
    registry, worker = Registry(), Worker.from_config(engine.config)
    worker.models = engine.models
    registry.add(worker)
    registry.set_state(worker, State.READY)
    return registry.candidates(model)


async def compare_tokens(engine: Engine, prompts: Prompts, notes: Notebook) -> None:
    """Compare the tokens of some prompts with what the engine makes of them."""
    model, source = prompts.model, prompts.source
    if source.source == "engine":
        notes.ok("tokenizer", f"{model}: the engine tokenizes its prompts itself")
        return
    if source.tokenizer is None or source.source == "bytes":
        message = f"{model}: no tokenizer is configured, prompts are cut into approximate chunks of bytes"
        mend = f"set models.{model}.tokenizer to the directory of the model's tokenizer, or source: engine"
        if engine.config.kv_events is None:
            notes.note("tokenizer", message, mend)
        else:
            notes.problem("tokenizer", f"{message}, of which KV events know nothing: there will be no hits", mend)
        return
    for what, (path, body) in _SAMPLES.items():
        check = "tokenizer" if path == COMPLETIONS else "template"
        try:
            theirs = await prompts.engine_ids(path, body)
        except EngineError as error:
            notes.note(check, f"{model}: {what} could not be compared: {error}")
            continue
        ours = await prompts.prompt(path, body)
        if not ours.exact:
            mend = f"set models.{model}.chat_template" if check == "template" else f"set models.{model}.tokenizer"
            notes.problem(check, f"{model}: {what} cannot be tokenized here", f"{mend} to a usable file")
        elif ours.ids != theirs:
            notes.problem(check, f"{model}: {what} {_difference(ours.ids, theirs)}", _token_mend(check, model))
            if check == "tokenizer":
                return  # nothing made with it can be right
        else:
            notes.ok(check, f"{model}: {what} is the engine's, {ours.tokens} tokens")


def _difference(ours: bytes, theirs: bytes) -> str:
    mine, its = np.frombuffer(ours, "<u4"), np.frombuffer(theirs, "<u4")
    shared = min(len(mine), len(its))
    differing = np.flatnonzero(mine[:shared] != its[:shared])
    at = int(differing[0]) if len(differing) else shared
    return f"differs from token {at} on: {len(mine)} tokens here, {len(its)} in the engine"


def _token_mend(check: str, model: str) -> str:
    if check == "tokenizer":
        return f"set models.{model}.tokenizer to the tokenizer that the engine uses (its --tokenizer, else --model)"
    return f"set models.{model}.chat_template to the file that the engine gets with --chat-template, or remove it there"


class Probe(NamedTuple):
    """A prompt that was sent twice.

    Attributes:
        ids: its token ids, packed; empty where only the engine knows them.
        tokens: its length, as the engine reports it.
        cached: tokens of it that the engine found in its cache the second time; None where it does not report them.
    """

    ids: bytes
    tokens: int
    cached: int | None


async def send_twice(engine: Engine, prompts: Prompts, notes: Notebook, chunk_tokens: int) -> Probe | None:
    """Send a new prompt of some chunks twice, and note what the engine found of it; None if it could not be sent."""
    room = engine.max_tokens.get(engine.models[prompts.model], 0) or 1 << 30
    words = max(_MIN_WORDS, min(3 * chunk_tokens, room // 4))
    chance = random.SystemRandom()
    text = " ".join(chance.choice(_WORDS) for _ in range(words))
    # What nobody has sent before begins with its first token: the engine can have nothing of it.
    body = {"prompt": f"{chance.getrandbits(64)} {text}", "max_tokens": 1, "temperature": 0}
    try:
        await engine.post(COMPLETIONS, {"model": prompts.model, **body})
        tokens, cached = _usage(await engine.post(COMPLETIONS, {"model": prompts.model, **body}))
        prompt = await prompts.prompt(COMPLETIONS, body)
    except (Silent, GatewayError) as error:
        notes.problem("overlap", f"{prompts.model}: a prompt could not be served: {error}", "see the engine's log")
        return None
    note_report(engine, notes, cached)
    if cached is not None:
        _note_overlap(engine, notes, tokens, cached)
    return Probe(prompt.ids, tokens, cached)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def _usage(answer: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the prompt's tokens and those that were cached; a usage of another shape reports nothing."""
    try:
        usage = msgspec.convert(answer, _Answer).usage or _Usage()
    except msgspec.ValidationError:
        usage = _Usage()
    details = usage.prompt_tokens_details or _Details()
    return usage.prompt_tokens or 0, details.cached_tokens


def _note_overlap(engine: Engine, notes: Notebook, tokens: int, cached: int) -> None:
    block = engine.block_size or 1
    whole = (tokens - 1) // block * block
    if cached >= whole:
        notes.ok("overlap", f"of a prompt of {tokens} tokens sent twice, {cached} came from the cache")
    elif cached:
        message = f"of a prompt of {tokens} tokens sent twice, only {cached} came from the cache"
        notes.note("overlap", message, "is the cache too small for the load?")
    else:
        message = f"a prompt of {tokens} tokens sent twice was computed twice"
        notes.problem("overlap", message, f"start the engine with {prefix_caching_flag(engine.kind)}")


def share_described(ids: bytes, runs: list[bytes]) -> float:
    """Return the share of a prompt's tokens that occur in the token runs of stored blocks.

    Args:
        ids: the prompt, packed.
        runs: of each event, the packed tokens of its blocks.
    """
    return sum(len(run) for run in runs if run and run in ids) / max(TOKEN_BYTES, len(ids))
