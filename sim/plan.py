"""Sizing a fleet with a pencil: closed formulas over the fitted constants, no simulation, no I/O.

What it neglects is said with each function; ``kvway sim`` replays traffic where that matters. Seconds, bytes, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.cost import (
    ModelShape,
    break_even_bytes_per_s,
    expected_benefit_s,
    kv_bytes,
    paged_kv_bytes,
    recompute_seconds,
)
from sim.profiles import Link, Profile


class Impossible(ValueError):
    """No fleet of any size meets the targets; the message says which one cannot be met and why."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """KV cache of a batch: exact bytes, bytes a paged allocator takes, and the most that paging can add."""

    exact_bytes: float
    paged_bytes: float
    overhead: float
    overhead_bound: float


def footprint(shape: ModelShape, tokens: int, batch: int, block_tokens: int) -> Footprint:
    """Return what ``batch`` sequences of ``tokens`` tokens hold; the overhead of paging is at most (block − 1)/S."""
    exact = kv_bytes(shape, tokens, batch)
    paged = paged_kv_bytes(shape, tokens, block_tokens, batch)
    return Footprint(exact, paged, paged / exact - 1, (block_tokens - 1) / tokens)


@dataclass(frozen=True, slots=True)
class Reload:
    """Reloading a prefix from one tier, held against recomputing it.

    Attributes:
        tier: its name.
        link: bandwidth and latency.
        seconds: ``α + M/B``.
        speedup: recompute time over reload time.
        pays: whether reloading is the faster way, at this length.
        benefit_s: ``P(reuse)·(T_recompute − T_transfer)``, what keeping the prefix there is worth per look-up.
    """

    tier: str
    link: Link
    seconds: float
    speedup: float
    pays: bool
    benefit_s: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Recompute time of a prefix, the bandwidth above which reloading wins, and every tier held against it."""

    size_bytes: float
    recompute_s: float
    bytes_per_s: float
    tiers: tuple[Reload, ...]


def break_even(
    shape: ModelShape,
    tokens: int,
    links: Mapping[str, Link],
    *,
    flops: float = 0.0,
    profile: Profile | None = None,
    attention: bool = False,
    reuse: float = 1.0,
) -> BreakEven:
    """Hold reloading ``tokens`` tokens against recomputing them.

    Args:
        shape: the model.
        tokens: S.
        links: tiers by name.
        flops: attainable floating-point operations per second; used where there is no profile.
        profile: fitted prefill times, instead of ``flops``.
        attention: count the quadratic term of attention; a profile always does.
        reuse: probability that the prefix is asked for again.

    Returns:
        The comparison. The break-even bandwidth is ``FLOPS·L·H_kv·D_h·P/N`` for the linear term alone; otherwise the
        size over the recompute time, which is the same where only the linear term counts.
    """
    size = kv_bytes(shape, tokens)
    recompute = profile.ttft_s(tokens) if profile is not None else recompute_seconds(shape, tokens, flops, attention)
    linear = profile is None and not attention
    needed = break_even_bytes_per_s(shape, flops) if linear else size / recompute
    reloads = []
    for tier, link in links.items():
        seconds = link.seconds(size)
        benefit = expected_benefit_s(reuse, recompute, seconds)
        reloads.append(Reload(tier, link, seconds, recompute / seconds, seconds < recompute, benefit))
    return BreakEven(size, recompute, needed, tuple(reloads))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a fleet is to bear, in means.

    Attributes:
        requests_per_s: of the whole fleet.
        prompt_tokens: length of a prompt.
        output_tokens: length of an answer.
        hit: share of prompt tokens that are found cached in HBM.
        variation: coefficient of variation of the prefill time; 1 is as irregular as an exponential.
    """

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    hit: float = 0.0
    variation: float = 1.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of workers and what they would do.

    Attributes:
        workers: how many.
        gpus: of all of them.
        utilisation: share of a worker's time that grows with its tokens.
        batch: mean number of requests that decode on a worker.
        kv_tokens: tokens of KV cache these hold, on average.
        itl_s: mean time between tokens.
        ttft_s: mean time to first token.
        ttft_quantile_s: the quantile that was asked for.
    """

    workers: int
    gpus: int
    utilisation: float
    batch: float
    kv_tokens: float
    itl_s: float
    ttft_s: float
    ttft_quantile_s: float


def evaluate(
    profile: Profile, traffic: Traffic, workers: int, quantile: float = 0.9, step_tokens: int = 8192
) -> Fleet | None:
    """Return what ``workers`` workers make of the traffic; None where they cannot bear it.

    Traffic is split evenly and at random (a good router does better). Prefill is chunked into decode steps, so that
    its work stretches them: with ``B`` requests in decode, ``B = r·output·ITL`` (Little) and
    ``ITL = d0 + B·(d1 + d2·context) + prefill work per step``, which solves to ``ITL = d0/(1 − utilisation)``.
    Prefills wait for each other as in M/G/1 (Pollaczek–Khinchine); the tail of the wait is taken as exponential.

    Args:
        profile: a worker's fitted times.
        traffic: of the whole fleet.
        workers: how many share it.
        quantile: of TTFT, 0..1.
        step_tokens: tokens that an engine computes per step.
    """
    rate = traffic.requests_per_s / workers
    cached = traffic.prompt_tokens * traffic.hit
    new = max(1.0, traffic.prompt_tokens - cached)
    work = new * (profile.prefill_b_s + profile.prefill_c_s * (cached + new / 2))
    context = traffic.prompt_tokens + traffic.output_tokens / 2
    decode = profile.decode_d1_s + profile.decode_d2_s * context
    utilisation = rate * (work + traffic.output_tokens * decode)
    if utilisation >= 1:
        return None
    itl = profile.decode_d0_s / (1 - utilisation)
    batch = rate * traffic.output_tokens * itl
    steps = math.ceil(new / step_tokens)
    service = work + steps * (max(profile.prefill_a_s, profile.decode_d0_s if batch > 1 else 0.0) + batch * decode)
    busy = rate * service
    if busy >= 1:
        return None
    wait = busy * service * (1 + traffic.variation**2) / (2 * (1 - busy))
    late = wait / busy * math.log(busy / (1 - quantile)) if busy > 1 - quantile else 0.0
    return Fleet(
        workers, workers * profile.gpus, utilisation, batch, batch * context, itl, service + wait, service + late
    )


def size_fleet(
    profile: Profile,
    traffic: Traffic,
    ttft_s: float,
    itl_s: float,
    kv_capacity_tokens: int,
    quantile: float = 0.9,
    most: int = 100_000,
) -> Fleet:
    """Return the smallest fleet that keeps TTFT (at the quantile), mean ITL and the KV cache within bounds.

    Raises:
        Impossible: even one request alone misses a target, or ``most`` workers are not enough.
    """
    context = traffic.prompt_tokens + traffic.output_tokens
    if context > kv_capacity_tokens:
        raise Impossible(
            f"one request has {context:,.0f} tokens, but a worker's KV cache holds {kv_capacity_tokens:,}; "
            "take more GPUs per worker, a smaller model, or fp8 KV cache"
        )
    cached = traffic.prompt_tokens * traffic.hit
    alone = profile.ttft_s(max(1, round(traffic.prompt_tokens - cached)), round(cached))
    if alone > ttft_s:
        raise Impossible(
            f"one request alone on a worker has a TTFT of {alone:.3f} s, above the target of {ttft_s:g} s; "
            "no number of workers helps: take faster workers, or a higher hit rate"
        )
    if profile.itl_s(1, round(context)) > itl_s:
        raise Impossible(
            f"one request alone decodes at {profile.itl_s(1, round(context)) * 1e3:.1f} ms a token, above the target "
            f"of {itl_s * 1e3:g} ms; take faster workers or more GPUs per worker"
        )

    def enough(workers: int) -> bool:
        fleet = evaluate(profile, traffic, workers, quantile)
        return (
            fleet is not None
            and fleet.ttft_quantile_s <= ttft_s
            and fleet.itl_s <= itl_s
            and fleet.kv_tokens <= kv_capacity_tokens
        )

    high = 1
    while not enough(high):
        high *= 2
        if high > most:
            raise Impossible(f"more than {most:,} workers would be needed; check the units of the targets")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    fleet = evaluate(profile, traffic, high, quantile)
    assert fleet is not None
    return fleet


@dataclass(frozen=True, slots=True)
class TierOption:
    """One size of a lower tier and what it costs per month, GPUs included.

    Attributes:
        size_tokens: tokens the tier holds.
        size_bytes: the same in bytes.
        hit: share of prompt tokens found in HBM or the tier.
        tier_cost: of the tier.
        gpu_cost: of the GPU time that prefill and reloading still take.
    """

    size_tokens: int
    size_bytes: float
    hit: float
    tier_cost: float
    gpu_cost: float

    @property
    def cost(self) -> float:
        """Both together."""
        return self.tier_cost + self.gpu_cost


@dataclass(frozen=True, slots=True)
class Prices:
    """What hardware costs, in any one currency: per GPU and hour, and per GB of the tier and month."""

    gpu_hour: float
    gb_month: float


HOURS_PER_MONTH = 730.0


def size_tier(
    profile: Profile,
    link: Link,
    prices: Prices,
    requests_per_s: float,
    prompt_tokens: float,
    hbm_hit: float,
    curve: Sequence[tuple[int, float]],
) -> list[TierOption]:
    """Return the cost of each size of a tier below HBM; the cheapest is the one to buy.

    GPU time is charged as if it could be bought by the second: prefill of what misses, and reloading what the tier
    serves where that is the faster way. Reloading is not overlapped with compute here.

    Args:
        profile: a worker's fitted times.
        link: of the tier.
        prices: of GPU and tier.
        requests_per_s: of the whole fleet.
        prompt_tokens: mean length of a prompt.
        hbm_hit: share of prompt tokens found in HBM alone.
        curve: tokens the tier holds → share of prompt tokens found in HBM or the tier.
    """
    options = []
    for size_tokens, hit in curve:
        lower = max(0.0, hit - hbm_hit) * prompt_tokens
        cached = hit * prompt_tokens
        new = max(1.0, prompt_tokens - cached)
        prefill = profile.ttft_s(round(new), round(cached))
        reload = min(
            link.seconds(lower * profile.kv_bytes_per_token) if lower else 0.0,
            profile.ttft_s(round(lower), round(cached - lower)) if lower else 0.0,
        )
        busy_gpus = requests_per_s * (prefill + reload) * profile.gpus
        size_bytes = size_tokens * profile.kv_bytes_per_token
        tier_cost = size_bytes / 1e9 * prices.gb_month
        gpu_cost = busy_gpus * HOURS_PER_MONTH * prices.gpu_hour
        options.append(TierOption(size_tokens, float(size_bytes), hit, tier_cost, gpu_cost))
    return options
