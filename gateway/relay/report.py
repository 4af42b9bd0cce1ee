"""Asking vLLM to tell of the blocks that a request reuses, so that a cold index fills itself.

By default a prefix hit publishes nothing: who has missed the storing of a block does not learn of it until it is
evicted. ``kv_cache_report_mode: full`` among a request's ``vllm_xargs`` makes the engine announce those blocks again.
"""

from __future__ import annotations

from typing import Final

_FIELD: Final = b'"vllm_xargs":{"kv_cache_report_mode":"full"},'


def asking_for_report(body: bytes) -> bytes:
    """Return a request body, a JSON object with at least one field, that asks for a report as well.

    A body that has ``vllm_xargs`` of its own, or seems to, is returned as it is.
    """
    if b'"vllm_xargs"' in body:
        return body
    begin = body.index(b"{") + 1
    return b"%b%b%b" % (body[:begin], _FIELD, body[begin:])
