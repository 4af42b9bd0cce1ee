"""What a worker is sent, and in it what its engine is asked for besides.

vLLM can be asked to tell of the blocks that a request reuses, so that a cold index fills itself. By default a prefix
hit publishes nothing: who has missed the storing of a block does not learn of it until it is evicted.
``kv_cache_report_mode: full`` among a request's ``vllm_xargs`` makes the engine announce those blocks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.relay.route import Route

_FIELD: Final = b'"vllm_xargs":{"kv_cache_report_mode":"full"},'


def asking_for_report(body: bytes) -> bytes:
    """Return a request body, a JSON object with at least one field, that asks for a report as well.

    A body that has ``vllm_xargs`` of its own, or seems to, is returned as it is.
    """
    if b'"vllm_xargs"' in body:
        return body
    begin = body.index(b"{") + 1
    return b"%b%b%b" % (body[:begin], _FIELD, body[begin:])


def body_for(route: Route, path: str, body: bytes) -> bytes:
    """Return what a route's worker gets of a request.

    Args:
        route: where it goes.
        path: of the request.
        body: what it gets where there is nothing of its own for it.
    """
    body = route.body or body
    if route.asks_report:
        body = asking_for_report(body)
    return body if route.hint is None else route.hint.body(path, body)
