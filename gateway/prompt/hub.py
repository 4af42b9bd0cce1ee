"""Tokenizer files from the Hugging Face hub, by way of the hub's own client and its cache on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gateway.prompt.tokenizer import TokenizerError

# Everything that says how prompts become tokens, and nothing of the weights.
_FILES: Final = ["*.json", "*.jinja", "additional_chat_templates/*.jinja", "tekken*", "tokenizer.model*"]
_NOT_FILES: Final = ["*.index.json"]
_TIMEOUT_S: Final = 5.0


def fetch(repository: str) -> Path:
    """Return a directory with the tokenizer files of a repository, downloading those that are not in the cache.

    Where the hub cannot be reached, or must not be (``HF_HUB_OFFLINE``), what the cache holds is taken as it is.

    Args:
        repository: ``owner/name``, or ``owner/name@revision``.

    Raises:
        TokenizerError: neither the hub nor the cache has it.
    """
    from huggingface_hub import snapshot_download  # takes its time to import, and few configurations need it

    name, _, revision = repository.partition("@")
    try:
        directory = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=_FILES,
            ignore_patterns=_NOT_FILES,
            etag_timeout=_TIMEOUT_S,
        )
    except Exception as error:  # of the client, of its HTTP library, of the disk
        reason = str(error).strip().partition("\n")[0]
        raise TokenizerError(
            f"{repository}: neither the Hugging Face hub nor its cache gives it ({type(error).__name__}: {reason}); "
            "check the name and the network, or copy the files and set models.<name>.tokenizer to their directory"
        ) from None
    return Path(directory)
