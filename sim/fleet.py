"""What a simulated fleet is made of, and what its gateway does not know."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Final, Literal

from policies.base import Tier
from policies.order import create_order
from sim.profiles import LINKS, Profile, find_profile
from sim.requests import Trace

EvictionName = Literal["lru", "radix", "cost", "salience"]
OffloadName = Literal["store", "evict"]
MOST_WORKERS: Final = 10_000
MOST_REPLICAS: Final = 1_000
MOST_BLOCKS: Final = 20_000_000
MOST_SAMPLES: Final = 10_000_000
EVICTIONS: Final[tuple[EvictionName, ...]] = ("lru", "radix", "cost", "salience")


@dataclass(slots=True, frozen=True, kw_only=True)
class TierSettings:
    """A tier below HBM; every worker has one of its own, unless it is the shared pool.

    Attributes:
        name: what reports call it: ``host``, ``cxl``, ``nvme``, ``pool`` …
        tier: how the gateway sees it; CXL memory is host memory to a router.
        capacity_tokens: tokens it would hold without compression.
        read_bytes_per_s: effective bandwidth towards HBM, of one worker (of all together for a shared tier).
        write_bytes_per_s: the same away from HBM.
        latency_s: seconds before the first byte.
        compression: bytes held and moved, relative to what lies in HBM: 1 as they are, .5 FP8, .25 INT4 or CacheGen.
        codec_bytes_per_s: uncompressed bytes that are decompressed per second; infinite: for nothing.
        watermark: filled beyond this share of its capacity, the tier moves its coldest blocks to the one below.
        idle_s: so do blocks that have not been used for so long; noticed when something is stored.
        shared: one pool for all workers, behind one link.
    """

    name: str
    tier: Tier
    capacity_tokens: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    compression: float = 1.0
    codec_bytes_per_s: float = inf
    watermark: float = 1.0
    idle_s: float = inf
    shared: bool = False

    def __post_init__(self) -> None:
        where = f"tier {self.name!r}"
        if self.tier is Tier.HBM:
            raise ValueError(f"{where}: tier must be HOST, DISK or REMOTE; HBM is capacity_tokens of the fleet")
        if self.capacity_tokens < 0:
            raise ValueError(f"{where}: capacity_tokens must not be negative, but is {self.capacity_tokens}")
        for name in ("read_bytes_per_s", "write_bytes_per_s", "codec_bytes_per_s", "idle_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{where}: {name} must be above 0, not {getattr(self, name)}")
        if not (self.latency_s >= 0 and isfinite(self.latency_s)):
            raise ValueError(f"{where}: latency_s must be finite and not negative, but is {self.latency_s}")
        for name in ("compression", "watermark"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{where}: {name} must be above 0 and at most 1, not {getattr(self, name)}")


@dataclass(slots=True, frozen=True, kw_only=True)
class EvictionSettings:
    """What goes first when HBM is full; see ``sim.eviction`` for the rules.

    Attributes:
        rule: ``lru`` as vLLM; ``radix``, ``cost`` (the score Φ) or ``salience``.
        pin_uses: radix: prefixes that this many requests have used stay as long as anything else can go.
        recency_weight: cost: weight of the time of the last use, per ``recency_s``.
        recency_s: cost: seconds of idleness that are worth one unit.
        reuse_weight: cost: weight of log2(1 + uses).
        recompute_weight: cost: weight of the milliseconds of prefill that a token costs.
        slo_weight: cost: weight of how much too late the first token of the last use came, in ``ttft_goal_s``.
        ttft_goal_s: cost: seconds within which first tokens should come; infinite: there is no goal.
        sink_tokens: salience: leading tokens of every prompt that stay as long as anything else can go.
        recent_s: salience: so do blocks used within this time.
        tool_ttl_s: blocks of a request that ends with a tool call are not evicted for so long; 0: no such pinning.
        tool_share: at most this share of HBM is pinned so.
    """

    rule: EvictionName = "lru"
    pin_uses: int = 8
    recency_weight: float = 1.0
    recency_s: float = 60.0
    reuse_weight: float = 1.0
    recompute_weight: float = 1.0
    slo_weight: float = 1.0
    ttft_goal_s: float = inf
    sink_tokens: int = 1024
    recent_s: float = 30.0
    tool_ttl_s: float = 0.0
    tool_share: float = 0.5

    def __post_init__(self) -> None:
        if self.rule not in EVICTIONS:
            raise ValueError(f"unknown eviction rule {self.rule!r}; known rules: {', '.join(EVICTIONS)}")
        if self.pin_uses < 1 or not self.recency_s > 0 or not self.ttft_goal_s > 0:
            raise ValueError("eviction: pin_uses must be at least 1, recency_s and ttft_goal_s above 0")
        weights = ("recency_weight", "reuse_weight", "recompute_weight", "slo_weight")
        for name in (*weights, "sink_tokens", "recent_s", "tool_ttl_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"eviction: {name} must be finite and not negative, but is {getattr(self, name)}")
        if not 0 <= self.tool_share <= 1:
            raise ValueError(f"eviction: tool_share must be between 0 and 1, not {self.tool_share}")


@dataclass(slots=True, frozen=True, kw_only=True)
class GatewaySettings:
    """What lies between the fleet as it is and the fleet as a policy sees it.

    Attributes:
        replicas: gateways that take turns; each has a policy of its own.
        sync_lag_s: seconds until a gateway knows of another's dispatches; infinite: never.
        event_lag_s: seconds from a change of a cache to the gateway's index.
        metrics_s: seconds between two scrapes of the engines' own numbers.
        speculation_s: how long a dispatched prompt counts as cached after its first byte.
        approximate: no events: residency is an LRU model of what was dispatched.
        tokenize_s_per_token: seconds per prompt token before a request can be routed.
        overhead_s: seconds per request before it can be routed, whatever its length.
        order: in which order requests that are held go on (``policies.order``), or ``none``; by default the gateway's.
        order_params: parameters of the order.
        budget_tokens: uncached tokens that a worker is given at a time where requests are held.
        piece_tokens: under ``least-work``, prompts with more than twice as many uncached tokens go in pieces of so many
            (``policies.pieces``); 0: all go whole.
        make_room: under ``least-work``, conversations that have lost their context wait for room (``policies.room``).
    """

    replicas: int = 1
    sync_lag_s: float = inf
    event_lag_s: float = 0.0
    metrics_s: float = 1.0
    speculation_s: float = 2.0
    approximate: bool = False
    tokenize_s_per_token: float = 0.0
    overhead_s: float = 0.0
    order: str = "least-work"
    order_params: dict[str, Any] = field(default_factory=dict)
    budget_tokens: int = 8192
    piece_tokens: int = 8192
    make_room: bool = True

    def __post_init__(self) -> None:
        if self.order != "none":
            create_order(self.order, self.order_params)
        if self.budget_tokens < 1:
            raise ValueError(f"gateway: budget_tokens must be at least 1, not {self.budget_tokens}")
        if self.piece_tokens < 0:
            raise ValueError(f"gateway: piece_tokens must not be negative, but is {self.piece_tokens}")
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ValueError(f"gateway: replicas must be 1 to {MOST_REPLICAS}, not {self.replicas}")
        if not 0 < self.metrics_s < inf:
            raise ValueError(f"gateway: metrics_s must be above 0 and finite, not {self.metrics_s}")
        for name in ("event_lag_s", "speculation_s", "tokenize_s_per_token", "overhead_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"gateway: {name} must be finite and not negative, but is {getattr(self, name)}")
        if not self.sync_lag_s >= 0:
            raise ValueError(f"gateway: sync_lag_s must not be negative, but is {self.sync_lag_s}")


@dataclass(slots=True, frozen=True, kw_only=True)
class DisaggregationSettings:
    """Prompts are computed by some workers and decoded by the others.

    Attributes:
        prefill_workers: the first so many of the fleet prefill, the others decode.
        bytes_per_s: effective bandwidth of the link between them, shared by all transfers.
        latency_s: seconds before the first byte of a transfer.
        policy: which prompts go through both: ``always`` all, ``never`` none, ``break-even`` those that gain by it, as
            the gateway decides (``policies.disaggregation``). The others stay with a decode worker as a whole.
        interference: for ``break-even``: how much a second of prefill costs every request that runs beside it, in
            seconds of TTFT.
        itl_weight: what a second of ITL is worth, in seconds of TTFT.
        least_tokens: prompts of which the best decode worker would have to compute fewer tokens than this stay there,
            whatever the policy.
        pull_back_s: how long the prompt of an answered turn is known to lie with the worker that decoded it, so that
            the next turn's prefill worker pulls it from there, as far as it has not been evicted, instead of computing
            it; 0: nothing is pulled.
    """

    prefill_workers: int
    bytes_per_s: float = 40e9
    latency_s: float = 2e-3
    policy: Literal["always", "never", "break-even"] = "always"
    interference: float = 0.1
    itl_weight: float = 100.0
    least_tokens: int = 0
    pull_back_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill_workers < 1:
            raise ValueError(f"disaggregation: prefill_workers must be at least 1, not {self.prefill_workers}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"disaggregation: bytes_per_s must be above 0, not {self.bytes_per_s}")
        if not 0 <= self.latency_s < inf or self.least_tokens < 0:
            raise ValueError("disaggregation: latency_s and least_tokens must not be negative")
        if not 0 <= self.pull_back_s < inf:
            raise ValueError(f"disaggregation: pull_back_s must be finite and not negative, but is {self.pull_back_s}")
        if self.policy not in ("always", "never", "break-even"):
            raise ValueError(f"disaggregation: policy must be always, never or break-even, not {self.policy!r}")
        if not 0 <= self.interference < inf or not 0 <= self.itl_weight < inf:
            raise ValueError("disaggregation: interference and itl_weight must be finite and not negative")


@dataclass(slots=True, frozen=True, kw_only=True)
class Failure:
    """Something breaks, and comes back.

    Attributes:
        at_s: when.
        down_s: for how long; infinite: for good.
        worker: the worker that dies, with its HBM and host memory; None: none does.
        link: name of the tier whose links are lost, ``transfer`` for the one between prefill and decode; empty: none.
        cold: the worker comes back without what lay on its disks as well.
    """

    at_s: float
    down_s: float = inf
    worker: int | None = None
    link: str = ""
    cold: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < inf or not self.down_s > 0:
            raise ValueError(f"failure: at_s ({self.at_s}) must not be negative and down_s ({self.down_s}) above 0")
        if (self.worker is None) == (not self.link):
            raise ValueError("failure: names a worker or a link, one of them")


@dataclass(slots=True, frozen=True, kw_only=True)
class ReplicationSettings:
    """Prefixes that many requests use are copied to further workers before these need them.

    Attributes:
        copies: workers that are to hold a hot prefix.
        uses: requests within ``interval_s`` that make a prefix hot.
        interval_s: how often hot prefixes are looked for.
        bytes_per_s: effective bandwidth of the network, shared by all copies.
    """

    copies: int = 2
    uses: int = 16
    interval_s: float = 10.0
    bytes_per_s: float = 20e9

    def __post_init__(self) -> None:
        if self.copies < 1 or self.uses < 1:
            raise ValueError(f"replication: copies ({self.copies}) and uses ({self.uses}) must be at least 1")
        if not 0 < self.interval_s < inf or not self.bytes_per_s > 0:
            raise ValueError("replication: interval_s and bytes_per_s must be above 0")


@dataclass(slots=True, frozen=True, kw_only=True)
class PullSettings:
    """Workers fetch prefixes from one another where a policy says so.

    Attributes:
        bytes_per_s: effective bandwidth of a worker's link, each way.
        latency_s: seconds before the first byte of a fetch.
    """

    bytes_per_s: float = 20e9
    latency_s: float = 0.026

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"pull: bytes_per_s must be above 0, not {self.bytes_per_s}")
        if not 0 <= self.latency_s < inf:
            raise ValueError(f"pull: latency_s must be finite and not negative, but is {self.latency_s}")


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetSettings:
    """A fleet of equal workers.

    Attributes:
        workers: how many.
        profile: their speed: ``model/gpu/tensor-parallel`` of ``sim.profiles``, or a profile of one's own.
        capacity_tokens: tokens of KV cache in HBM, of each.
        block_tokens: tokens per block of the engine. A whole prompt that is cached is still computed from its last
            full block on, and HBM is given out in blocks of the trace, which are whole multiples of it.
        max_batched_tokens: tokens computed per engine step; at least ``max_running``.
        max_running: requests in one batch.
        tiers: tiers below HBM, fastest first.
        offload: when blocks are copied to the first tier below HBM: ``store``: as they are computed (vLLM);
            ``evict``: when they are about to leave HBM. What a link cannot take in time is not copied.
        prefetch: bring what a waiting request will need from slower tiers into the first one.
        layers: transformer layers: a reload overlaps with the prefill behind it layer by layer; 1: not at all.
        eviction: what goes first when HBM is full.
        gateway: what the gateway does not know.
        disaggregation: prefill and decode apart; None: every worker does both.
        failures: what breaks, and when.
        replication: copies of hot prefixes; None: none are made.
        pull: fetching of prefixes from other workers; None: nothing is fetched.
        sample_s: seconds between two samples of each worker's load.
    """

    workers: int = 8
    profile: str | Profile = "llama-3.1-70b/h100/4"
    capacity_tokens: int = 461_376
    block_tokens: int = 16
    max_batched_tokens: int = 8192
    max_running: int = 256
    tiers: tuple[TierSettings, ...] = ()
    offload: OffloadName = "store"
    prefetch: bool = True
    layers: int = 80
    eviction: EvictionSettings = field(default_factory=EvictionSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    disaggregation: DisaggregationSettings | None = None
    failures: tuple[Failure, ...] = ()
    replication: ReplicationSettings | None = None
    pull: PullSettings | None = None
    sample_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("workers", "capacity_tokens", "block_tokens", "max_batched_tokens", "max_running", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"fleet: {name} must be at least 1, not {getattr(self, name)}")
        if self.workers > MOST_WORKERS:
            raise ValueError(f"fleet: workers must be at most {MOST_WORKERS}, not {self.workers}")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"fleet: max_batched_tokens ({self.max_batched_tokens}) must be at least max_running "
                f"({self.max_running}): every running request needs a token per step"
            )
        if not 0 < self.sample_s < inf:
            raise ValueError(f"fleet: sample_s must be above 0 and finite, not {self.sample_s}")
        if self.offload not in ("store", "evict"):
            raise ValueError(f"fleet: offload must be 'store' or 'evict', not {self.offload!r}")
        order = [tier.tier for tier in self.tiers]
        if order != sorted(order):
            raise ValueError("fleet: tiers must be listed fastest first: HOST, DISK, REMOTE")
        apart = self.disaggregation
        if apart is not None and apart.prefill_workers >= self.workers:
            raise ValueError(
                f"fleet: {apart.prefill_workers} of {self.workers} workers prefill: none is left to decode"
            )
        self._check_failures()
        if isinstance(self.profile, str):
            find_profile(self.profile)

    def _check_failures(self) -> None:
        links = [tier.name for tier in self.tiers]
        if self.disaggregation is not None:
            links.append("transfer")
        for name in links:
            if links.count(name) > 1:
                raise ValueError(
                    f"fleet: {name!r} names several tiers or links: failures and reports need one name each"
                )
        for failure in self.failures:
            if failure.worker is not None and not 0 <= failure.worker < self.workers:
                raise ValueError(f"fleet: failure of worker {failure.worker}: workers are 0 to {self.workers - 1}")
            if failure.link and failure.link not in links:
                known = ", ".join(sorted(links)) or "none"
                raise ValueError(f"fleet: failure of link {failure.link!r}: known links: {known}")

    def check(self, trace: Trace) -> None:
        """Raise ValueError, naming the request, if the fleet cannot serve a trace."""
        size, most = trace.block_tokens, self.capacity_tokens // trace.block_tokens
        if self.workers * most > MOST_BLOCKS:
            raise ValueError(
                f"fleet: {self.workers} workers with {self.capacity_tokens} tokens of HBM are {self.workers * most:,} "
                f"blocks of {size} tokens; at most {MOST_BLOCKS:,} can be simulated"
            )
        if (last_s := trace.requests[-1].arrival_s) / self.sample_s * self.workers > MOST_SAMPLES:
            raise ValueError(
                f"trace {trace.name!r} lasts {last_s:.3g} s, too long for samples of {self.workers} workers every "
                f"{self.sample_s:g} s; raise sample_s or load"
            )
        if size % self.block_tokens:
            raise ValueError(
                f"trace {trace.name!r}: blocks of {size} tokens are not multiples of the engine's {self.block_tokens}"
            )
        if 0 < self.gateway.piece_tokens < size:
            raise ValueError(
                f"trace {trace.name!r}: its blocks of {size} tokens are longer than pieces of prompts "
                f"(gateway: piece_tokens, {self.gateway.piece_tokens})"
            )
        for number, request in enumerate(trace.requests):
            if -(-(request.prompt_tokens + request.output_tokens) // size) > most:
                raise ValueError(
                    f"trace {trace.name!r}, request {number}: {request.prompt_tokens} + {request.output_tokens} tokens "
                    f"do not fit the {self.capacity_tokens} tokens of a worker's HBM; raise capacity_tokens"
                )

    @property
    def speed(self) -> Profile:
        """The workers' profile."""
        return self.profile if isinstance(self.profile, Profile) else find_profile(self.profile)


def host_tier(profile: Profile, capacity_tokens: int) -> TierSettings:
    """Return host memory of the given size behind the PCIe links of the profile's GPUs."""
    link = LINKS["host"]
    bandwidth = link.bytes_per_s * profile.gpus
    return TierSettings(
        name="host",
        tier=Tier.HOST,
        capacity_tokens=capacity_tokens,
        read_bytes_per_s=bandwidth,
        write_bytes_per_s=bandwidth,
        latency_s=link.latency_s,
    )
