"""The sections of ``kvway.yaml`` about workers: those that are listed, and where others are found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from gateway.config_sections import MAX_PORT, OnDisk, Seconds, Section, WorkerPort, has_host_and_port


class KvEventsConfig(Section):
    """Where a worker publishes its KV cache events."""

    endpoint: str = Field(description="ZMQ endpoint of the engine's publisher, tcp://host:5557")
    replay_endpoint: str | None = Field(None, description="ZMQ endpoint of the engine's replay socket, tcp://host:5558")
    topic: str = Field("", description="topic prefix to subscribe to; empty for all")
    mode: Literal["connect", "bind"] = Field(
        "connect",
        description="connect to the engine's bound publisher, or bind and let the engine connect to us",
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _zmq(cls, value: str | None) -> str | None:
        match = re.match(r"^(?:tcp://.+:(\d+|\*)|ipc://.+)$", value or "")
        if value is not None and (match is None or ((match[1] or "").isdecimal() and int(match[1]) > MAX_PORT)):
            raise ValueError(f"{value!r} is not a ZMQ endpoint; write tcp://host:port")
        return value


class PrefillConfig(Section):
    """Prefill time of a worker, ``a + b·n + c·n·(p + n/2)``: a start value, corrected by what is observed."""

    a_s: Seconds = Field(0.011, description="fixed seconds per prefill")
    b_s: Seconds = Field(58e-6, description="seconds per new token")
    c_s: Seconds = Field(1.05e-9, description="seconds per new token and context token")


class TiersConfig(Section):
    """What bringing KV back from a lower tier costs: ``kv_bytes_per_token`` over the tier's bandwidth.

    The defaults are a 70B model with 8 KV heads in FP16, one GPU's PCIe 5 link, an NVMe gen 4 drive and 100 Gbit/s
    Ethernet; for another model set at least ``kv_bytes_per_token`` (layers x KV heads x head size x 2 x bytes).
    """

    kv_bytes_per_token: int = Field(327_680, gt=0, description="KV cache bytes per token, all layers")
    host_gb_s: float = Field(45.0, gt=0, description="GB/s from host memory")
    disk_gb_s: float = Field(7.0, gt=0, description="GB/s from local disk")
    remote_gb_s: float = Field(10.0, gt=0, description="GB/s from the remote pool")


class DisaggregationConfig(Section):
    """Prompts prefilled by workers with role `prefill`, for those that decode; see docs/disaggregation.md."""

    policy: Literal["always", "never", "break-even"] = Field(
        "break-even", description="which requests go over two workers; break-even: those that gain by it"
    )
    link_gb_s: float = Field(
        10.0, gt=0, description="GB/s between two workers to start from, corrected by what is observed"
    )
    near_gb_s: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (25.0, 50.0, 200.0),
        description="the same for two that share the first level of their `topology`, the first two, and so on; the "
        "last one holds for more",
    )
    latency_s: Seconds = Field(0.005, description="what a hand-over takes besides moving KV")
    interference: float = Field(
        0.1,
        ge=0,
        description="how much a second of prefill costs every request that runs beside it, in seconds of TTFT",
    )
    itl_weight: float = Field(
        100.0, ge=0, description="seconds of TTFT that a second of ITL is worth: the ratio of the two targets"
    )
    decode_gb_s: float = Field(
        12_000.0, gt=0, description="GB/s at which a decode worker reads KV in a step, all its GPUs together"
    )
    lease_s: Seconds = Field(
        20.0, description="how long KV that was not fetched can still be; less than the engines' kv_lease_duration"
    )
    lmcache_bind: str | None = Field(
        None,
        pattern=r"^tcp://.+:\d+$",
        description="where prefill workers with pd lmcache tell that KV is written (pd_proxy_port): tcp://*:7500; "
        "without it their answer is taken for that (pd_skip_proxy_notification)",
    )
    pull_back_s: Seconds = Field(
        0.0,
        description="how long decode workers with pd nixl keep the KV of an answered turn, for the prefill of the next "
        "one to pull: less than the engines' decoder_kv_blocks_ttl (480); 0: their bidirectional_kv_xfer is off",
    )


class ReplicationConfig(Section):
    """Prefixes that many prompts share are held in several failure domains; see docs/replication.md."""

    enabled: bool = Field(True, description="compute hot prefixes in a second failure domain; false: nothing of this")
    interval_s: float = Field(20.0, gt=0, description="how often hot prefixes are looked for")
    least_uses: int = Field(4, ge=2, description="prompts within interval_s that make the prefix they share hot")
    least_tokens: int = Field(1024, ge=1, description="shorter prefixes are computed anew soon enough")
    domains: int = Field(
        2, ge=2, le=64, description="failure domains to hold a hot prefix; a worker without a domain is one of its own"
    )
    prefill_share: float = Field(
        0.02, gt=0, le=1, description="share of the tokens that the fleet could prefill that warm-ups may take"
    )
    max_queue_s: Seconds = Field(
        0.25, description="no warm-ups while workers have more prefill waiting, on average, in seconds"
    )
    max_bytes: int = Field(16 * 2**20, ge=2**16, description="memory for the prompts that warm-ups are made of")


class CacheControlConfig(Section):
    """What `kvway cache` may do; see docs/cache-control.md."""

    coordinator: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+/?$",
        description="URL of LMCache's coordinator, http://host:9300; the `--instance-id` of an LMCache server is the "
        "name of the worker it serves",
    )
    world_size: int = Field(
        1, ge=1, le=255, description="ranks of each engine before LMCache, tensor times pipeline parallel: in its keys"
    )
    warm_up_tokens_per_min: int = Field(
        1_000_000, ge=0, description="uncached tokens that prefetches may make workers compute; 0: none"
    )


class PullConfig(Section):
    """Prefixes that engines fetch from other workers instead of computing them; see docs/disaggregation.md."""

    group: str = Field("", description="workers that name the same group fetch from one another; empty: it does not")
    gb_s: float = Field(
        10.0, gt=0, description="GB/s at which it fetches, to start from; corrected by what is observed"
    )
    latency_s: Seconds = Field(0.026, description="what a fetch takes besides moving KV")
    hint: Literal["none", "vllm-p2p"] = Field(
        "none",
        description="vllm-p2p: requests name the worker to fetch from, for vLLM's offloading tier `p2p`; none: the "
        "engine finds it (LMCache, Mooncake store)",
    )
    port: WorkerPort = Field(5710, description="with hint vllm-p2p: where others fetch from it, of rank 0")


class WorkerSettings(Section):
    """What may be the same for many engine instances."""

    models: tuple[str, ...] = Field((), description="model names; empty: ask the worker's /v1/models")
    api_key_file: OnDisk | None = Field(
        None,
        description="file with the API key that the engine asks for (`--api-key`), read at every request of kvway's "
        "own: probes, tokenization, warm-ups, resets; requests of clients keep the key that they came with",
    )
    domain: str = Field("", description="failure domain, for instance the zone")
    topology: str = Field(
        "",
        description="where it stands for transfers, widest level first: zone-a/rack-3/node-7; default: its domain",
    )
    role: Literal["mixed", "prefill", "decode"] = Field(
        "mixed", description="what the engine is set up for, where prefill and decode are apart"
    )
    pd: Literal["nixl", "mooncake", "lmcache", "sglang"] = Field(
        "nixl",
        description="how KV goes from prefill to decode: vLLM's NixlConnector or MooncakeConnector, LMCache's "
        "disaggregated prefill, or SGLang's disaggregation; see docs/disaggregation.md",
    )
    bootstrap_port: WorkerPort = Field(
        8998, description="of a prefill worker with pd mooncake or sglang: port of its bootstrap server"
    )
    lmcache_init_ports: tuple[WorkerPort, ...] = Field(
        (7300,),
        min_length=1,
        description="of a decode worker with pd lmcache: its pd_peer_init_port, one for each tensor-parallel rank",
    )
    lmcache_alloc_ports: tuple[WorkerPort, ...] = Field(
        (7400,), min_length=1, description="the same for its pd_peer_alloc_port"
    )
    kv_capacity_tokens: int = Field(0, ge=0, description="KV cache size; 0: read it from the worker's metrics")
    pool: str = Field(
        "",
        description="shared remote tier (LMCache remote backend, Mooncake store) that it reads; what one worker "
        "announces there counts for all that name the pool",
    )
    pool_tiers: tuple[Literal["host", "disk", "remote"], ...] = Field(
        ("remote",),
        description="tiers in its events that are the pool; the connectors of Mooncake and LMCache call it cpu: "
        "write [host, remote] for them",
    )
    pull: PullConfig = Field(PullConfig(), description="fetching of KV from other workers")
    prefill: PrefillConfig = Field(PrefillConfig(), description="prefill speed to start from")
    tiers: TiersConfig = Field(TiersConfig(), description="speed of the lower cache tiers")

    @property
    def answers_alone(self) -> bool:
        """Whether it answers requests that name no partner; SGLang's workers of one role do not."""
        return self.pd != "sglang" or self.role == "mixed"

    def takes_over_from(self, prefill: WorkerSettings) -> bool:
        """Return whether it decodes what a prefill worker has computed; SGLang's mixed ones do not."""
        decodes = self.role == "decode" or (self.role == "mixed" and self.pd != "sglang")
        return decodes and self.pd == prefill.pd


class WorkerConfig(WorkerSettings):
    """One engine instance."""

    url: str = Field(
        description="base URL, http://host:port; https is checked against the system's authorities, or the PEM file "
        "in the environment variable SSL_CERT_FILE"
    )
    name: str | None = Field(None, pattern=r"^[!-~]+$", description="name in metrics and headers; default host:port")
    kv_events: KvEventsConfig | None = Field(None, description="KV events; without them residency is not known")
    data_parallel_rank: int | None = Field(
        None, ge=0, description="only this rank of the engine: requests get the header x-data-parallel-rank"
    )

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not re.match(r"^https?://[^/?#@\s]+/?$", value) or not has_host_and_port(value):
            raise ValueError(f"{value!r} is not a worker URL; write http://host:port without a path")
        return value.rstrip("/")

    @property
    def label(self) -> str:
        """The worker's name: the one given, else ``host:port``."""
        if self.name is not None:
            return self.name
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _names_differ(workers: tuple[WorkerConfig, ...]) -> tuple[WorkerConfig, ...]:
    seen: set[str] = set()
    for worker in workers:
        if worker.label in seen:
            raise ValueError(f"two workers are called {worker.label!r}; names must differ")
        seen.add(worker.label)
    return workers


Workers = Annotated[tuple[WorkerConfig, ...], AfterValidator(_names_differ)]


class WorkersFile(Section):
    """The whole of a file of workers (``discovery.files``)."""

    workers: Workers


class FoundConfig(WorkerSettings):
    """What holds for every worker that a source finds; annotations of a pod or Service win over it."""

    scheme: Literal["http", "https"] = Field("http", description="how the engines are reached")
    port: WorkerPort = Field(8000, description="their HTTP port")
    kv_events_port: WorkerPort | None = Field(
        None, description="port of the KV event publisher; without it the engine is asked, see docs/discovery.md"
    )
    kv_replay_port: WorkerPort | None = Field(None, description="port of the replay socket; goes with kv_events_port")
    kv_topic: str = Field("", description="topic prefix of the events; goes with kv_events_port")
    data_parallel_size: int = Field(
        1, ge=1, le=1024, description="data-parallel ranks behind one port; goes with kv_events_port"
    )

    @field_validator("data_parallel_size")
    @classmethod
    def _a_port_each(cls, value: int, info: ValidationInfo) -> int:
        for key in ("kv_events_port", "kv_replay_port"):
            if (info.data.get(key) or 0) + value - 1 > MAX_PORT:
                raise ValueError(f"the ports from {key} on do not suffice for {value} ranks")
        return value

    @classmethod
    def own_keys(cls) -> set[str]:
        """Return the keys that are not of ``WorkerSettings``."""
        return cls.model_fields.keys() - WorkerSettings.model_fields.keys()


class KubernetesConfig(Section):
    """Pods or Services of a Kubernetes cluster, kept up by list and watch."""

    kind: Literal["pods", "services"] = Field("pods", description="each pod is an engine, or each Service is one")
    selector: str = Field(min_length=1, description="label selector, for instance app=vllm")
    namespaces: tuple[Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")], ...] = Field(
        (), description="where to look, by name; empty: in the gateway's own namespace"
    )
    role_label: str = Field("kvway.io/role", description="label that says mixed, prefill or decode")
    relist_s: float = Field(
        5.0, gt=0, description="a watch is replaced by a new list after so long; longer above 100 pods"
    )
    api_url: str | None = Field(
        None, pattern=r"^https?://[^/?#@\s]+/?$", description="API server; default: that of the cluster we run in"
    )
    token_file: Path | None = Field(
        None,
        description="bearer token, read at every request, none is sent if there is no such file; default: that of our "
        "service account, but none where api_url is set",
    )
    ca_file: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"),
        description="PEM authorities of the API server; the system's if there is no such file",
    )
    worker: FoundConfig = Field(FoundConfig(), description="what holds for every worker found")


class DnsConfig(Section):
    """All addresses of a DNS name, for instance of a headless Service."""

    name: str = Field(min_length=1, description="name to resolve")
    interval_s: float = Field(5.0, gt=0, description="time between two look-ups")
    timeout_s: float = Field(5.0, gt=0, description="a look-up that takes longer has failed")
    worker: FoundConfig = Field(FoundConfig(), description="what holds for every worker found")


class FileConfig(Section):
    """A file with a list `workers:`, as in this one, that may change at any time."""

    path: OnDisk = Field(description="YAML or JSON file")
    interval_s: float = Field(1.0, gt=0, description="how often it is looked at")


class DiscoveryConfig(Section):
    """Workers that are found, besides those listed; see docs/discovery.md.

    Where two sources find the same, the first one counts.
    """

    kubernetes: tuple[KubernetesConfig, ...] = Field((), description="from the API server of Kubernetes")
    dns: tuple[DnsConfig, ...] = Field((), description="from DNS")
    files: tuple[FileConfig, ...] = Field((), description="from files")

    def __bool__(self) -> bool:
        """Whether there is any source."""
        return bool(self.kubernetes or self.dns or self.files)

    @property
    def may_find_pools(self) -> bool:
        """Whether workers may be found that share a remote tier."""
        settings = [source.worker for source in self.kubernetes] + [source.worker for source in self.dns]
        return bool(self.files) or any(each.pool for each in settings)
