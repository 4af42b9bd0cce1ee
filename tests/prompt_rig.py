"""What the tests of the prompt room share: the tiny model, template fixtures, small tokenizers of every kind."""

from __future__ import annotations

import json
import os
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

import sim
from gateway.config import Config, WorkerConfig
from gateway.fleet.registry import Candidates, Worker
from gateway.prompt.chat import Chat
from gateway.prompt.conversation import outline
from gateway.prompt.parsing import parse_request
from gateway.prompt.pipeline import PromptPipeline
from gateway.prompt.prompt import Prompt
from gateway.prompt.request import ChatRequest
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tools import parse_tools
from policies.base import FleetView

DATA = Path(__file__).parent / "data"
TEMPLATES = DATA / "templates"
TINY = Path(sim.__file__).parent / "data" / "tiny-model"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|endoftext|>"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "Hello!"}]

TEMPLATE_NAMES = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def load_json(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


BODIES: dict[str, dict[str, Any]] = load_json(TEMPLATES / "bodies.json")


@cache
def api_bodies(api: str) -> dict[str, dict[str, Any]]:
    """Return the bodies of another API, ``messages`` or ``responses``, by name."""
    return dict(load_json(DATA / "apis" / "bodies.json")[api])


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text("utf-8"), SPECIAL_TOKENS)


def chat_request(body: dict[str, Any]) -> ChatRequest:
    request = parse_request(CHAT, json.dumps(body).encode())
    assert isinstance(request, ChatRequest)
    return request


def chat_of(body: dict[str, Any], chosen: ChatTemplate) -> Chat:
    request = chat_request(body)
    return Chat.of(request, outline(request.messages, chosen.parts), parse_tools(bytes(request.tools)))


def config(tokenizer: Path | None = TINY, **prompt: Any) -> Config:
    model = {} if tokenizer is None else {"tokenizer": str(tokenizer)}
    return Config.model_validate({"models": {"*": model}, "prompt": prompt})


def candidates(model: str = "tiny", lora: str | None = None, url: str = "http://127.0.0.1:9") -> Candidates:
    worker = Worker.from_config(WorkerConfig(url=url, models=(model,)))
    return Candidates(model, lora, [worker], [0], FleetView([worker.name]))


async def prompt_of(pipeline: PromptPipeline, path: str, body: dict[str, Any] | bytes, **wanted: Any) -> Prompt:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await pipeline.prompt(pipeline.parse(path, raw), candidates(**wanted))


def ids_of(prompt: Prompt) -> list[int]:
    return array("I", prompt.ids).tolist()


def reference(directory: Path = TINY) -> tokenizers.Tokenizer:
    """Return the model's tokenizer as Hugging Face ``tokenizers`` has it."""
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def agent_texts() -> list[Path]:
    """Return the recorded agent sessions; the calling test is skipped where there are none."""
    traces = Path(os.environ.get("KVWAY_TRACES", Path(__file__).parents[2] / "shared" / "traces")) / "agent_text"
    files = sorted(traces.glob("*.jsonl.gz"))
    if not files:
        pytest.skip(f"no agent texts in {traces}; set KVWAY_TRACES to the directory of traces")
    return files


CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock, isn't it?",
    "def f(x):\n    return {'a': x + 1, \"b\": [1, 2.5, None]}\n\n\nclass A(B):\n\tpass\n",
    "Zürich, naïve café, 日本語テキスト, русский, العربية, हिन्दी, 👩‍👩‍👧‍👦 🇩🇪",
    "   spaces   and\ttabs\r\nand lines\n\n\n  ",
    "user assistant system tool role content hello world weather in the city and the next one",
] * 4


def train(kind: str, added: list[AddedToken]) -> tokenizers.Tokenizer:
    """Return a small tokenizer of one of the common kinds.

    Args:
        kind: ``byte-level`` (GPT, Llama 3, Qwen), ``split`` (the same with another pattern), ``metaspace`` (Mistral),
            ``prepend`` (Llama 2), ``wordpiece`` (BERT) or ``unigram`` (T5).
        added: its added tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained: tokenizers.Tokenizer
    trainer: Any = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    if kind in ("byte-level", "split"):
        trained = tokenizers.Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "byte-level")
        pattern = tokenizers.Regex(
            r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
        )
        split = pre_tokenizers.Split(pattern, "isolated")
        trained.pre_tokenizer = (
            byte_level if kind == "byte-level" else pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
        )
        trained.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    elif kind == "metaspace":
        trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    elif kind == "prepend":
        trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trained.normalizer = normalizers.Sequence(  # type: ignore[assignment]
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    elif kind == "wordpiece":
        trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        trained.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
        trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
        trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)
    else:
        trained = tokenizers.Tokenizer(models.Unigram())
        trained.normalizer = normalizers.Sequence(  # type: ignore[assignment]
            [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        )
        trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    trained.train_from_iterator(CORPUS, trainer)
    trained.add_tokens(added)
    return trained


KINDS = ("byte-level", "split", "metaspace", "prepend", "wordpiece", "unigram")


def save(tokenizer: tokenizers.Tokenizer, directory: Path, config: dict[str, Any] | None = None) -> Path:
    """Write a model directory."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
