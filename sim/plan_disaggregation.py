"""Whether prefill and decode on different workers pay, with a pencil: one kind of request, every link. Seconds, bytes.

Prefill is chunked into decode steps where a worker does both. A decode worker has ``B`` requests in its batch, as many
as the target for ITL and its KV cache allow. Nothing waits here: ``kvway sim`` shows what queues make of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sim.plan import Impossible
from sim.profiles import Link, Profile


@dataclass(frozen=True, slots=True)
class Demand:
    """One kind of request, and what its user wants.

    Attributes:
        prompt_tokens: length of the prompt.
        uncached_tokens: of it, those that are cached nowhere; the decode worker holds the others.
        output_tokens: length of the answer.
        itl_s: target for the mean time between tokens.
        ttft_s: target for the time to first token.
    """

    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    itl_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Handover:
    """A prompt handed over by one link.

    Attributes:
        link: its name.
        bytes_per_s: effective bandwidth.
        transfer_s: ``α + M/B`` for the KV of the uncached tokens.
        ttft_share: the same as a share of the target for TTFT.
        ttft_s: prefill on an idle worker, transfer, and one decode step.
        break_even_streams: requests that have to decode on a worker, for a prompt to be better handed over than
            prefilled there: ``transfer/(interference·work)``; None: no number of them is enough. As the gateway decides
            where nothing waits, but for the fixed part of a prefill, which it counts and which a step that decodes
            takes anyway.
        break_even_tokens: uncached tokens from which a prompt is, beside as many as there are; None: no number of them
            is enough.
        pays: whether this request is.
    """

    link: str
    bytes_per_s: float
    transfer_s: float
    ttft_share: float
    ttft_s: float
    break_even_streams: float | None
    break_even_tokens: int | None
    pays: bool


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Prefill and decode apart, held against workers that do both.

    Attributes:
        transfer_bytes: KV of the uncached tokens.
        prefill_s: of them, alone on a worker.
        batch: B, requests that decode together within the target for ITL.
        itl_apart_s: ``d0 + B·(d1 + d2·context)``.
        itl_whole_s: the same with their own prefills in between: ``B/output`` of them in every step.
        pause_whole_s: the longest step that a prefill makes: a whole chunk beside the batch.
        ttft_whole_s: of one more prompt on that worker: its chunks in steps that they share.
        decode_rate: requests per second that one decode worker ends.
        prefill_rate: requests per second that one prefill worker computes.
        whole_rate: requests per second of one worker that does both within the target for ITL.
        prefill_per_decode: prefill workers per decode worker.
        handovers: every link.
    """

    transfer_bytes: float
    prefill_s: float
    batch: int
    itl_apart_s: float
    itl_whole_s: float
    pause_whole_s: float
    ttft_whole_s: float
    decode_rate: float
    prefill_rate: float
    whole_rate: float
    prefill_per_decode: float
    handovers: tuple[Handover, ...]

    @property
    def apart_rate(self) -> float:
        """Requests per second and worker, of both pools in the right ratio."""
        return self.decode_rate / (1 + self.prefill_per_decode)


def disaggregation(
    profile: Profile,
    kv_bytes_per_token: float,
    kv_capacity_tokens: int,
    demand: Demand,
    links: Mapping[str, Link],
    *,
    streams: int = 0,
    interference: float = 0.1,
    utilisation: float = 0.7,
    step_tokens: int = 8192,
) -> Disaggregation:
    """Hold prefill and decode apart against workers that do both, for one kind of request.

    Args:
        profile: a worker's fitted times; both pools have equal workers.
        kv_bytes_per_token: K and V of one token over all layers.
        kv_capacity_tokens: tokens of KV cache of a worker.
        demand: the request.
        links: between the pools, by name.
        streams: requests that decode beside it where it is not handed over; 0: a full batch.
        interference: how much a second of prefill costs every request that runs beside it, in seconds of TTFT.
        utilisation: of prefill workers; beyond it prompts wait for each other too long.
        step_tokens: tokens that an engine computes per step.

    Raises:
        Impossible: one request alone misses the target for ITL or does not fit into the KV cache.
    """
    new, cached = demand.uncached_tokens, demand.prompt_tokens - demand.uncached_tokens
    decode_s = profile.decode_d1_s + profile.decode_d2_s * (demand.prompt_tokens + demand.output_tokens / 2)
    batch = _batch(profile, decode_s, kv_capacity_tokens, demand)
    itl_apart = profile.decode_d0_s + batch * decode_s
    prefill = profile.ttft_s(new, cached)
    work = prefill - profile.prefill_a_s
    steps = math.ceil(new / step_tokens)
    chunk = min(new, step_tokens)
    shared_step = max(profile.prefill_a_s, profile.decode_d0_s) + batch * decode_s
    last_chunk = profile.ttft_s(chunk, demand.prompt_tokens - chunk) - profile.prefill_a_s
    decode_rate = batch / (demand.output_tokens * itl_apart)
    prefill_rate = utilisation / prefill
    size = kv_bytes_per_token * new

    def handover(name: str, link: Link) -> Handover:
        transfer = link.seconds(size)
        weight = interference * (streams or batch)
        return Handover(
            link=name,
            bytes_per_s=link.bytes_per_s,
            transfer_s=transfer,
            ttft_share=transfer / demand.ttft_s,
            ttft_s=prefill + transfer + itl_apart,
            break_even_streams=transfer / (interference * work) if interference else None,
            break_even_tokens=_break_even_tokens(profile, kv_bytes_per_token, demand.prompt_tokens, link, weight),
            pays=weight * work > transfer,
        )

    return Disaggregation(
        transfer_bytes=size,
        prefill_s=prefill,
        batch=batch,
        itl_apart_s=itl_apart,
        itl_whole_s=itl_apart + batch / demand.output_tokens * work,
        pause_whole_s=shared_step + last_chunk,
        ttft_whole_s=work + steps * shared_step,
        decode_rate=decode_rate,
        prefill_rate=prefill_rate,
        whole_rate=_whole_rate(profile, work, decode_s, kv_capacity_tokens, demand),
        prefill_per_decode=decode_rate / prefill_rate,
        handovers=tuple(handover(name, link) for name, link in links.items()),
    )


def _batch(profile: Profile, decode_s: float, kv_capacity_tokens: int, demand: Demand) -> int:
    """Return the most requests that decode together within the target for ITL and the KV cache."""
    context = demand.prompt_tokens + demand.output_tokens
    if context > kv_capacity_tokens:
        raise Impossible(f"one request has {context:,} tokens, but a worker's KV cache holds {kv_capacity_tokens:,}")
    within_itl = int((demand.itl_s - profile.decode_d0_s) / decode_s)
    if within_itl < 1:
        raise Impossible(
            f"one request alone decodes at {(profile.decode_d0_s + decode_s) * 1e3:.1f} ms a token, above the target "
            f"of {demand.itl_s * 1e3:g} ms; take faster workers or more GPUs per worker"
        )
    return min(within_itl, kv_capacity_tokens // context)


def _whole_rate(profile: Profile, work_s: float, decode_s: float, kv_capacity_tokens: int, demand: Demand) -> float:
    """Return the requests per second of a worker that does both.

    With ``u`` the share of its time that grows with tokens, ``ITL = d0/(1 - u)`` (see ``sim.plan.evaluate``); by
    Little's law ``rate·output·ITL`` requests decode at a time.
    """
    per_request = work_s + demand.output_tokens * decode_s
    within_itl = (1 - profile.decode_d0_s / demand.itl_s) / per_request
    most = kv_capacity_tokens // (demand.prompt_tokens + demand.output_tokens)
    # rate·output·d0/(1 - rate·per_request) = most
    within_kv = most / (demand.output_tokens * profile.decode_d0_s + most * per_request)
    return min(within_itl, within_kv)


def _break_even_tokens(
    profile: Profile, kv_bytes_per_token: float, prompt_tokens: int, link: Link, weight: float
) -> int | None:
    """Return the uncached tokens of a prompt from which ``weight·work`` is more than their transfer.

    With ``w`` the weight, ``P`` the prompt, ``t`` the seconds that a token is on its way and ``α`` the latency, ``n``
    tokens gain ``w·n·(b + c·(P - n/2)) - α - n·t``: less than nothing at first, the most at ``P + (b - t/w)/c``.
    """
    if not weight:
        return None
    b, c, token_s = profile.prefill_b_s, profile.prefill_c_s, kv_bytes_per_token / link.bytes_per_s

    def gains(new: int) -> bool:
        return weight * new * (b + c * (prompt_tokens - new / 2)) > link.latency_s + new * token_s

    low, high = 0, round(max(1.0, min(prompt_tokens, prompt_tokens + (b - token_s / weight) / c)))
    if not gains(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high
