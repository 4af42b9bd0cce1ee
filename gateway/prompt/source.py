"""Where the tokens of a model's prompts come from."""

from __future__ import annotations

from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.prompt.model import Model


class Source(NamedTuple):
    """Where the tokens of one model's prompts come from.

    Attributes:
        model: tokenizes here; None where that cannot be done.
        engine: the engine is asked where it cannot be done here.
        tokenizes_alike: whether the engine's ``/tokenize`` makes of a chat what it will be run as.
        asks_media: the engine may be asked to fetch and process media.
        takes_templates: the engine takes chat templates from requests.
    """

    model: Model | None
    engine: bool
    tokenizes_alike: bool
    asks_media: bool
    takes_templates: bool

    @classmethod
    def of(cls, config: ModelConfig, model: Model | None) -> Source:
        """Return the source for a model as configured and loaded."""
        special = model.special if model is not None else None
        if special is not None and special.own_tokenizer:
            model = None
        return cls(
            model,
            config.source == "engine" or special is not None,
            special is None or special.tokenizes_alike,
            config.media == "engine",
            config.trust_request_chat_template,
        )
