"""Which requests are for the workers."""

from __future__ import annotations

import re
from typing import Final

_MODELS: Final = re.compile(rb"/v1/models(?:[/?]|$)")
_ENGINE_PATHS: Final = frozenset(
    {b"/classify", b"/detokenize", b"/invocations", b"/pooling", b"/rerank", b"/score", b"/tokenize", b"/v2/rerank"}
)


def is_relayed(target: bytes) -> bool:
    """Return whether a request target is for the workers rather than for the app."""
    if target.startswith(b"/v1/"):
        return not _MODELS.match(target)
    return target.partition(b"?")[0] in _ENGINE_PATHS
