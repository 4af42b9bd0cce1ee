"""Blocks to prefill and to decode, less a credit for what is cached: the selector of NVIDIA Dynamo's KV router.

In blocks, per worker::

    raw    = (prompt tokens + tokens being prefilled) / block
    decay  = 1 / (1 + affinity_decay · excess / prompt blocks)     excess: being prefilled, over the least loaded worker
    credit = device_weight · decay · HBM + host_weight · host + disk_weight · disk + remote_weight · remote
    cost   = prefill_scale · max(0, raw − credit) + decode blocks + request_weight · requests in flight
"""

from __future__ import annotations

from random import Random
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Floats, Residency, RoutingRequest, Seed, register
from policies.choose import decided, lowest

Weight = Annotated[float, msgspec.Meta(ge=0)]


class OverlapCostParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``overlap-cost``.

    Attributes:
        device_weight: credit for a block in HBM.
        host_weight: credit for a block in host memory.
        disk_weight: credit for a block on disk.
        remote_weight: credit for a block in the remote pool.
        affinity_decay: how fast the credit for HBM fades with the prefill that waits there; 0: it does not.
        prefill_scale: weight of prefill against decode.
        request_weight: blocks that a request in flight counts as, besides its own.
        temperature: 0 takes the least cost; above, workers are drawn, the likelier the less they cost: with
            probability proportional to exp(−(cost − least)/(range · temperature)).
        block_tokens: tokens per block.
        seed: makes the draws repeat; without it every process draws differently.
    """

    device_weight: Weight = 1.0
    host_weight: Weight = 0.75
    disk_weight: Weight = 0.25
    remote_weight: Weight = 0.0
    affinity_decay: Weight = 0.0
    prefill_scale: Weight = 1.0
    request_weight: Weight = 0.0
    temperature: Weight = 0.0
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    seed: Seed | None = None


@register
class OverlapCost:
    """Ties: running, ring."""

    name: ClassVar[str] = "overlap-cost"
    Params: ClassVar[type[msgspec.Struct]] = OverlapCostParams

    def __init__(self, params: OverlapCostParams, /) -> None:
        self._params = params
        self._weights = np.array([params.device_weight, params.host_weight, params.disk_weight, params.remote_weight])
        self._random = Random(params.seed)

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker of least cost, or one drawn by cost."""
        params, running = self._params, fleet.column("running")
        prompt = max(1, request.prompt_tokens)
        pending = fleet.column("pending_prefill_tokens") / params.block_tokens
        decay = 1.0 / (1.0 + params.affinity_decay * (pending - pending.min()) * params.block_tokens / prompt)
        overlap = residency.by_tier / params.block_tokens
        overlap[:, 0] *= decay
        credit = (overlap * self._weights).sum(1)
        prefill = np.maximum(prompt / params.block_tokens + pending - credit, 0.0)
        decode = fleet.column("decode_tokens") / params.block_tokens
        costs = params.prefill_scale * prefill + decode + params.request_weight * running
        row = self._drawn(costs) if params.temperature > 0 else lowest(fleet, request.key(), costs, running)
        terms = {"prefill_blocks": prefill, "credit_blocks": credit, "decode_blocks": decode, "decay": decay}
        return decided(request, residency, row, None, costs, terms)

    def _drawn(self, costs: Floats) -> int:
        above = costs - costs.min()
        scale = float(above.max()) * self._params.temperature
        likely = np.cumsum(np.exp(-above / scale)) if scale > 0 else np.arange(1.0, len(costs) + 1)
        drawn = int(likely.searchsorted(self._random.random() * likely[-1], side="right"))
        return min(drawn, len(costs) - 1)
