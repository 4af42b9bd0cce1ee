"""Whether a request goes over two workers, and over which: what each pair of them would cost.

The gateway's side of ``policies.disaggregation``: it finds both pools, what they hold of the prompt, and the links
between them. ``kvway explain`` asks here as requests do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Final, NamedTuple

import numpy as np

from gateway.errors import NoWorker
from gateway.fleet.registry import Candidates, Worker
from gateway.relay.plan import Plan
from gateway.relay.route import find_residency
from gateway.relay.services import Services
from gateway.relay.turns import Turn
from policies.base import Floats, RoutingRequest
from policies.disaggregation import (
    Comparison,
    Fetch,
    Prospects,
    Weights,
    choose_pair,
    compare,
    decoding_cost_s,
    prospects,
)

_MOVES_ALL: Final = frozenset({"lmcache", "sglang"})
"""Protocols by which the whole prompt is moved, also what the decode worker has cached of it."""


class Chosen(NamedTuple):
    """Two workers for one request.

    Attributes:
        prefill: the one that computes the prompt.
        decode: the one that answers.
        hit_tokens: prompt tokens that the first is believed to have cached.
    """

    prefill: Worker
    decode: Worker
    hit_tokens: int


@dataclass(slots=True)
class Pairing:
    """Both pools, and what each pair of their workers would cost one request.

    Attributes:
        request: the request.
        prefills: workers that prefill for others, ``n`` of them.
        decodes: workers that decode, ``m`` of them.
        comparison: ``[n, m]``.
        turn: what a decode worker keeps of the conversation.
    """

    request: RoutingRequest
    prefills: Candidates
    decodes: Candidates
    comparison: Comparison
    turn: Turn | None = None

    def choose(self, failed: Collection[Worker] = (), tried: Collection[Worker] = ()) -> Chosen | None:
        """Return the best pair.

        Args:
            failed: prefill workers that have failed.
            tried: decode workers that have; they are asked again only where there are no others.

        Returns:
            None where no prefill worker is left.
        """
        prefills, decodes = self.prefills.workers, self.decodes.workers
        costs = self.comparison.apart_s
        if failed or tried:
            costs = costs.copy()
            costs[[row for row, worker in enumerate(prefills) if worker in failed]] = inf
            again = [column for column, worker in enumerate(decodes) if worker in tried]
            if len(again) < len(decodes):
                costs[:, again] = inf
        pair = choose_pair(self.comparison, self.request, self.prefills.fleet, costs)
        if pair is None:
            return None
        row, column = pair
        return Chosen(prefills[row], decodes[column], int(self.comparison.there.held_tokens[row]))


class Verdict(NamedTuple):
    """Whether a request goes over two workers.

    Attributes:
        apart: it does.
        why: ``always``, ``never`` and ``break-even`` are policies, ``sglang`` is an engine that cannot do otherwise,
            ``form`` a request that must not, ``no_prefill_worker`` a pool that is empty, ``no_pair`` two pools of which
            no two workers can hand KV over.
        pairing: what the decision is made of; None where it follows from less.
    """

    apart: bool
    why: str
    pairing: Pairing | None = None


async def judge(services: Services, plan: Plan, sequences: int) -> Verdict:
    """Decide whether a request goes over two workers.

    Args:
        services: the other rooms.
        plan: the request's plan.
        sequences: how many it asks for; see ``legs.sequences``.
    """
    policy = services.config.disaggregation.policy
    assert plan.model is not None
    try:
        sglang = services.registry.prefilling(plan.model).workers[0].config.pd == "sglang"
        if sequences != 1 and not (sglang and sequences):
            return Verdict(False, "form")
        if policy == "never" and not sglang:
            return Verdict(False, "never")
        pairing = await find_pairing(services, plan)
    except NoWorker:
        return Verdict(False, "no_prefill_worker")
    if not pairing.comparison.possible:
        return Verdict(False, "no_pair")
    if sglang or policy == "always":
        return Verdict(True, "sglang" if sglang else "always", pairing)
    return Verdict(pairing.comparison.pays, "break-even", pairing)


async def find_pairing(services: Services, plan: Plan) -> Pairing:
    """Return what each pair of workers would cost a request.

    Raises:
        GatewayError: one of the pools is empty.
    """
    request, model = plan.request, plan.model
    assert request is not None and model is not None
    decodes, held_here = await find_residency(services, model, request)
    prefills, held_there = await find_residency(services, model, request, prefilling=True)
    now = monotonic()
    services.ledger.advance(now)
    weights = _weights(services, prefills.workers[0])
    turn = services.hand_overs.turns.find(request, now)
    fetch = _fetch(services, turn, prefills.workers) if turn is not None else None
    there = prospects(prefills.fleet, held_there, request.prompt_tokens, now, weights, fetch)
    here = prospects(decodes.fleet, held_here, request.prompt_tokens, now, weights)
    transfer_s = _transfer_s(services, prefills.workers, decodes.workers, here, request)
    return Pairing(request, prefills, decodes, compare(there, here, transfer_s, weights.interference), turn)


async def find_decoder(
    services: Services, plan: Plan, prefill: Worker, tried: Collection[Worker]
) -> tuple[Worker, int] | None:
    """Return the best worker to decode a prompt that has been computed, and how much of its KV would move there.

    Args:
        services: the other rooms.
        plan: the request's plan.
        prefill: where it was computed.
        tried: workers that have failed; they are asked again only where there are no others.

    Returns:
        None where no worker can take it over.

    Raises:
        GatewayError: no worker is there at all.
    """
    request, model = plan.request, plan.model
    assert request is not None and model is not None
    decodes, held = await find_residency(services, model, request)
    now = monotonic()
    services.ledger.advance(now)
    here = prospects(decodes.fleet, held, request.prompt_tokens, now, _weights(services, prefill))
    transfer_s = _transfer_s(services, [prefill], decodes.workers, here, request)[0]
    costs = decoding_cost_s(here, transfer_s)
    again = [row for row, worker in enumerate(decodes.workers) if worker in tried]
    if len(again) < len(costs):
        costs[again] = inf
    row = int(costs.argmin())
    if costs[row] == inf:
        return None
    return decodes.workers[row], request.prompt_tokens - int(_kept(prefill, here)[row])


def _weights(services: Services, worker: Worker) -> Weights:
    config = services.config.disaggregation
    read_s = worker.config.tiers.kv_bytes_per_token / (config.decode_gb_s * 1e9)
    return Weights(interference=config.interference, itl_weight=config.itl_weight, read_s=read_s)


def _fetch(services: Services, turn: Turn, prefills: list[Worker]) -> Fetch:
    """Return what pulling a kept turn takes."""
    kv_bytes = turn.worker.config.tiers.kv_bytes_per_token
    rate = services.hand_overs.rates.bytes_per_s
    return Fetch(turn.tokens, np.array([kv_bytes / rate(turn.worker.name, worker.name) for worker in prefills]))


def _transfer_s(
    services: Services, prefills: list[Worker], decodes: list[Worker], here: Prospects, request: RoutingRequest
) -> Floats:
    """Return the seconds that a prompt's KV takes between each two workers, ``[n, m]``."""
    source = prefills[0]
    size = (request.prompt_tokens - _kept(source, here)) * source.config.tiers.kv_bytes_per_token
    return services.config.disaggregation.latency_s + services.hand_overs.links(prefills, decodes) * size


def _kept(source: Worker, here: Prospects) -> Floats:
    """Return the tokens of a prompt that need not be moved to workers which hold them, ``[m]``."""
    return np.zeros_like(here.held_tokens) if source.config.pd in _MOVES_ALL else here.held_tokens
