"""The plan: what is known of a request before a worker is chosen, made once and followed by every attempt.

What cannot be known (no tokenizer, a prompt that cannot be prepared) makes the choice poorer, never the request fail.
"""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from gateway.config import RoutePath
from gateway.dispatch.pieces import LongPrompt
from gateway.errors import BadRequest, GatewayError
from gateway.observe.record import RequestRecord
from gateway.relay.legs import without_hosts
from gateway.relay.naming import named_model, only_model
from gateway.relay.services import Services
from policies.base import Policy, RoutingRequest

PROMPT_PATHS: Final = frozenset(get_args(RoutePath))
"""Requests whose prompt is read and whose worker is chosen by what it has cached."""

_DEFAULT_OUTPUT_TOKENS: Final = 256


class Plan(msgspec.Struct):
    """What is known of a request before a worker is chosen.

    Attributes:
        model: the name the client used, and some worker serves; None where the request names none.
        streamed: whether the answer comes token by token.
        request: what the policy sees; None for requests that go by load alone.
        body: what the worker gets in place of the client's body; None where it gets that.
        policy: decides about ``request``.
        prompt: what pieces of the prompt are made of, where it may go in pieces; forgotten once it is answered.
    """

    model: str | None = None
    streamed: bool = False
    request: RoutingRequest | None = None
    body: bytes | None = None
    policy: Policy | None = None
    prompt: LongPrompt | None = None

    def note(self, record: RequestRecord) -> None:
        """Write down what the request is."""
        record.stream = self.streamed
        if self.model is not None:
            record.model = self.model
        if self.request is not None:
            record.request = self.request
            record.prompt_tokens = self.request.prompt_tokens


async def make_plan(services: Services, method: bytes, path: str, body: bytes, counts: bool = True) -> Plan:
    """Read what routing needs from a request.

    Args:
        services: the other rooms.
        method: of the request.
        path: of the request.
        body: of the request.
        counts: whether it is a use of its prefix.

    Raises:
        GatewayError: the body is not a valid request, its model is not served, or no worker is there to serve it.
    """
    if path not in PROMPT_PATHS or method != b"POST":
        model = named_model(body) if body else None
        if model is not None:
            services.registry.candidates(model)  # raises for a model nobody serves
        moves_kv = services.registry.apart or services.registry.fleet.pulls is not None
        return Plan(model, body=without_hosts(body) if moves_kv and body else None)
    request = await services.prompts.read(path, body)
    model = request.model or only_model(services.registry)
    candidates = services.registry.candidates(model)
    config = services.config.prompt
    long: LongPrompt | None = None
    try:
        prompt = await services.prompts.prompt(request, candidates)
        tokens, chunks = prompt.tokens, prompt.chunks
        services.prompts.check(path, body, request, prompt, candidates)
        forwarded = services.prompts.body_with_ids(body, prompt, candidates)
        if counts and services.seen is not None:
            services.seen.note(model, path, body, request, prompt)
        if services.pieces is not None:
            long = services.pieces.read(model, request, prompt, candidates)
    except GatewayError:
        raise
    except Exception:
        services.complain("a prompt could not be prepared; its request goes by load")
        tokens, chunks, forwarded = int(len(body) / config.bytes_per_token), [], None
    routing_request = RoutingRequest(
        model=candidates.model,
        prompt_tokens=tokens,
        chunks=chunks,
        chunk_tokens=config.chunk_tokens,
        output_tokens=request.max_tokens or _DEFAULT_OUTPUT_TOKENS,
        session=request.session,
        priority=-(request.priority or 0),  # in requests, as engines have it, less is more urgent
    )
    policy = services.policies.of(model, candidates.model, path)
    return Plan(model, bool(request.stream), routing_request, forwarded, policy, long)


def prompt_path(path: str, body: bytes) -> str:
    """Return the path of a request that an operator asks about; an empty one is an OpenAI chat's or completion's.

    Raises:
        BadRequest: requests to it have no prompt.
    """
    path = path or ("/v1/chat/completions" if b'"messages"' in body else "/v1/completions")
    if path not in PROMPT_PATHS:
        raise BadRequest(f"Requests to {path} have no prompt; they go to the least loaded worker.")
    return path
