"""Models whose chats vLLM does not render with a chat template: recognized by their files, and left to the engine.

As vllm/config/model.py and vllm/tokenizers/registry.py choose a renderer, and ``OnlineRenderer`` for gpt-oss. To render
these here as if they had a template would make wrong tokens, a silent miss for ever.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple


class SpecialRenderer(NamedTuple):
    """How vLLM renders a model's chats, if not with a chat template.

    Attributes:
        name: of what renders.
        tokenizes_alike: whether the engine's ``/tokenize`` renders chats in that way, too.
        own_tokenizer: whether completions have other tokens, too, than ``tokenizer.json`` makes of them.
    """

    name: str
    tokenizes_alike: bool = True
    own_tokenizer: bool = False


HARMONY: Final = SpecialRenderer("Harmony", tokenizes_alike=False)
MISTRAL: Final = SpecialRenderer("mistral-common", own_tokenizer=True)
_BY_ARCHITECTURE: Final = {
    "DeepseekV32ForCausalLM": SpecialRenderer("DeepSeek V3.2's encoding"),
    "DeepseekV4ForCausalLM": SpecialRenderer("DeepSeek V4's encoding"),
    "DeepseekV4ForConditionalGeneration": SpecialRenderer("DeepSeek V4's encoding"),
    "DeepseekV41ForCausalLM": SpecialRenderer("DeepSeek V4.1's encoding"),
    "InklingForCausalLM": SpecialRenderer("Inkling's encoding"),
    "InklingForConditionalGeneration": SpecialRenderer("Inkling's encoding"),
    "KimiK3ForConditionalGeneration": SpecialRenderer("Kimi K3's encoding"),
    "MoonshotKimiaForCausalLM": SpecialRenderer("Kimi-Audio's tokenizer", own_tokenizer=True),
}


def special_renderer(directory: Path) -> SpecialRenderer | None:
    """Return how vLLM renders the chats of a model, None if it does so with a chat template.

    Args:
        directory: the model's files, or a copy of some of them.
    """
    config = _read_config(directory / "config.json")
    if config.get("model_type") == "gpt_oss":
        return HARMONY
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        special = _BY_ARCHITECTURE.get(architectures[0])
        if special is not None:
            return special
    return MISTRAL if _is_mistral(directory) else None


def _is_mistral(directory: Path) -> bool:
    """Whether Mistral's own tokenizer is there and, if there are weights at all, in Mistral's own format, too."""
    if not any(directory.glob("tekken.json")) and not any(directory.glob("tokenizer.model.v*")):
        return False
    return any(directory.glob("consolidated*.safetensors")) or not any(directory.glob("*.safetensors"))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
