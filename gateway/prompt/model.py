"""What it takes to tokenize the prompts of one model as its engine does: tokenizer, chat templates, caches."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.config import ModelConfig
from gateway.prompt.chat import Chat
from gateway.prompt.harmony import HarmonyRenderer
from gateway.prompt.hub import fetch
from gateway.prompt.renderer import ChatRenderer
from gateway.prompt.segments import Cutter, Segment, SegmentCache, choose_tokens
from gateway.prompt.special import HARMONY, SpecialRenderer, special_renderer
from gateway.prompt.template import ChatTemplate, TemplateError, load_templates
from gateway.prompt.tokenizer import Tokenizer, TokenizerError, load_tokenizer

log = logging.getLogger("kvway")

# Conversations one of which every template renders, to see which tokens part messages from each other.
_TURNS: Final = ["What comes first?", "This comes second.", "And what comes last?"]
_EXAMPLES: Final = (
    Chat(["user", "assistant", "user"], _TURNS),
    Chat(["system", "user", "assistant", "user"], ["How it is to be done.", *_TURNS]),
)


@dataclass(slots=True)
class Model:
    """A model whose prompts can be tokenized here.

    Attributes:
        segments: token ids by text; shared by models with the same tokenizer.
        cutter: cuts texts into segments.
        renderer: renders chats; None where the model has no usable chat template.
        before: what the engine puts before a text with ``add_special_tokens``.
        after: what it puts after it.
        special: how the engine renders chats, if not with a chat template.
        harmony: renders them, where that is Harmony and its library is there.
    """

    segments: SegmentCache
    cutter: Cutter
    renderer: ChatRenderer | None
    before: list[Segment]
    after: list[Segment]
    special: SpecialRenderer | None = None
    harmony: HarmonyRenderer | None = None


def load_models(
    configs: Iterable[ModelConfig], max_bytes: int, executor: Executor
) -> dict[tuple[Path | str | None, Path | None], Model]:
    """Load what is configured; what cannot be loaded is logged and left out.

    Args:
        configs: of models.
        max_bytes: bound on all segment caches together.
        executor: where long texts are encoded and plans drawn up.

    Returns:
        Models by ``ModelConfig.tokenizer_files`` and template path.
    """
    wanted = {
        (config.tokenizer_files, config.chat_template): config.tokenizer_files
        for config in configs
        if config.tokenizer_files is not None and config.source in ("auto", "tokenizer")
    }
    tokenizers: dict[Path | str, Tokenizer] = {}
    for files in dict.fromkeys(wanted.values()):
        try:
            tokenizers[files] = _load(files)
        except TokenizerError as error:
            log.warning("%s. Until then its models are routed by approximate chunks of bytes", error)
    by_digest = {tokenizer.digest: tokenizer for tokenizer in tokenizers.values()}
    caches = {
        digest: SegmentCache(tokenizer.encoder, max_bytes // len(by_digest), executor)
        for digest, tokenizer in by_digest.items()
    }
    return {
        key: _assemble(tokenizers[files], key[1], caches[tokenizers[files].digest], executor)
        for key, files in wanted.items()
        if files in tokenizers
    }


def find_problems(configs: Iterable[ModelConfig]) -> list[str]:
    """Return what ``load_models`` would log: one line for each tokenizer or template that cannot be used."""
    problems = []
    for config in configs:
        if config.tokenizer_files is None or config.source not in ("auto", "tokenizer"):
            continue
        try:
            tokenizer = _load(config.tokenizer_files)
            load_templates(tokenizer.directory, tokenizer.config, config.chat_template, tokenizer.special_tokens)
        except (TokenizerError, TemplateError) as error:
            problems.append(str(error))
    return problems


def _load(files: Path | str) -> Tokenizer:
    return load_tokenizer(files if isinstance(files, Path) else fetch(files))


def _assemble(tokenizer: Tokenizer, template: Path | None, segments: SegmentCache, executor: Executor) -> Model:
    special = special_renderer(tokenizer.directory)
    is_harmony = special is HARMONY and HarmonyRenderer.is_available()
    if special is not None:
        log.warning(
            "%s: vLLM renders this model's chats with %s, not with a template; %s left to the engine, which must be "
            "started with --enable-scale-out",
            tokenizer.directory,
            special.name,
            "Responses are" if is_harmony else "they are",
        )
    try:
        templates = load_templates(tokenizer.directory, tokenizer.config, template, tokenizer.special_tokens)
    except TemplateError as error:
        log.warning("%s. Until then chats are routed by approximate chunks of bytes", error)
        templates = None
    cutter = Cutter(_cut_before(templates[0], tokenizer) if templates else ())
    return Model(
        segments,
        cutter,
        ChatRenderer(*templates, cutter, executor) if templates and special is None else None,
        [Segment(tokenizer.prefix, used=True)] if tokenizer.prefix else [],
        [Segment(tokenizer.suffix, used=True)] if tokenizer.suffix else [],
        special,
        HarmonyRenderer(templates or ()) if is_harmony else None,
    )


def _cut_before(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    for chat in _EXAMPLES:
        with suppress(TemplateError):
            return choose_tokens(tokenizer.added_tokens, template.render(chat), chat.leaves)
    return []  # then texts stay whole, which is slower but as exact
