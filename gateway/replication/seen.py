"""The prompts of late: what is hot is found among them, and warm-ups are made of them.

On a request's way a prompt is only noted. It is looked at by the background task, and kept for two of its intervals at
most; the texts and token ids among them take no more than ``max_bytes``.
"""

from __future__ import annotations

import msgspec

from gateway.prompt.prompt import Prompt
from gateway.prompt.request import InferenceRequest
from policies.chunks import TOKEN_BYTES


class SeenPrompt(msgspec.Struct, gc=False):
    """A prompt that was asked for. As there are many, the garbage collector is kept from walking them.

    Attributes:
        model: the name that the client used, of a model or an adapter.
        cache_salt: separates caches of equal prompts.
        path: of the request.
        body: of the request; empty where the prompt's token ids are known.
        prompt: its chunks and, where they are known, its token ids.
    """

    model: str
    cache_salt: str | None
    path: str
    body: bytes
    prompt: Prompt


class SeenPrompts:
    """The prompts since the last ``take``.

    Args:
        max_bytes: bound on what is kept; further prompts are neither kept nor counted, the sample is large enough then.
    """

    __slots__ = ("_max_bytes", "_prompts", "_room")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._room = max_bytes
        self._prompts: list[SeenPrompt] = []

    def note(self, model: str, path: str, body: bytes, request: InferenceRequest, prompt: Prompt) -> None:
        """A prompt was asked for."""
        size = TOKEN_BYTES * prompt.tokens if prompt.exact else len(body)
        if prompt.chunks and size <= self._room:
            self._room -= size
            kept = b"" if prompt.exact else body
            self._prompts.append(SeenPrompt(model, request.cache_salt, path, kept, prompt))

    def take(self) -> list[SeenPrompt]:
        """Return the prompts, and begin anew."""
        taken, self._prompts, self._room = self._prompts, [], self._max_bytes
        return taken
