"""Prompts that begin alike go to the same worker, by consistent hashing with bounded loads (KubeAI's prefix-hash)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided
from policies.ring import ring_for


class PrefixHashParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``prefix-hash``.

    Attributes:
        prefix_chunks: how many chunks from the beginning of the prompt make the key.
        load_factor: how far above the mean number of requests a worker may go before keys walk on to the next.
    """

    prefix_chunks: Annotated[int, msgspec.Meta(ge=1)] = 1
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25


@register
class PrefixHash:
    """Key: model and first chunks of the prompt. Load: requests in flight."""

    name: ClassVar[str] = "prefix-hash"
    Params: ClassVar[type[msgspec.Struct]] = PrefixHashParams

    def __init__(self, params: PrefixHashParams, /) -> None:
        self._params = params

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the first worker on the prompt's way round the ring that is not above its share."""
        running = fleet.column("running").copy()
        row = ring_for(fleet).bounded(self._key(request), running, self._params.load_factor)
        return decided(request, residency, row, "ring", running)

    def _key(self, request: RoutingRequest) -> bytes:
        # a chunk's hash depends on every chunk before it, so the last one of the prefix stands for all of them
        chunks = request.chunks[: self._params.prefix_chunks]
        return request.model.encode("utf-8", "surrogatepass") + (chunks[-1] if chunks else request.ring_key)
