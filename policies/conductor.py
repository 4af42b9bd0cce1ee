"""The least predicted time to the first token, pulling a prefix that another worker holds (Mooncake's Conductor).

For every worker, in seconds::

    transfer   of what the best holder has more of the prompt, where that is more than ``pull_ratio`` times as much;
               and reload of what the worker itself holds below HBM
    queue      the prefill that waits there
    prefill    of what is then still missing

The policy places the request; the pulling is the engines' affair (a KV connector with a shared pool). Where they do
not pull, set ``pull_ratio`` so high that none is expected. Mooncake refuses requests whose time exceeds their SLO;
here nobody is refused by a policy.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np

from policies.base import Decision, FleetView, Residency, RoutingRequest, register
from policies.choose import decided, lower_tier_seconds, lowest, prefill_of, queue_seconds


class ConductorParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of ``conductor``.

    Attributes:
        pull_ratio: a worker pulls the longest prefix when that is more than so many times as long as its own.
        pull_s_per_token: seconds per token to pull; without it each worker's ``reload_remote_s``, and a worker where
            that is not known does not pull.
    """

    pull_ratio: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    pull_s_per_token: Annotated[float, msgspec.Meta(gt=0)] | None = None


@register
class Conductor:
    """Ties: running, ring. What is pulled does not count as an expected hit."""

    name: ClassVar[str] = "conductor"
    Params: ClassVar[type[msgspec.Struct]] = ConductorParams

    def __init__(self, params: ConductorParams, /) -> None:
        self._params = params

    def decide(self, request: RoutingRequest, fleet: FleetView, residency: Residency, now: float) -> Decision:
        """Return the worker with the least predicted time to the first token."""
        pull_s_per_token = self._params.pull_s_per_token or fleet.column("reload_remote_s")
        own, longest = residency.hit_tokens, residency.hit_tokens.max()
        pulls = (longest > own * self._params.pull_ratio) & (pull_s_per_token > 0)
        prefix = np.where(pulls, longest, own)
        transfer = (prefix - own) * pull_s_per_token
        queue = queue_seconds(fleet, now)
        prefill = prefill_of(fleet, np.maximum(request.prompt_tokens - prefix, 1), prefix)
        costs = transfer + queue + prefill + lower_tier_seconds(fleet, residency)
        row = lowest(fleet, request.key(), costs, fleet.column("running"))
        reason = "pull" if pulls[row] else None
        terms = {"pulled_tokens": prefix - own, "transfer_s": transfer, "queue_s": queue, "prefill_s": prefill}
        return decided(request, residency, row, reason, costs, terms, float(costs[row]))
