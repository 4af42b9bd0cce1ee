"""What a simulated worker can be told."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from sim.faults import Fault
from sim.fleet import MOST_BLOCKS
from sim.kv_events import EventFormat, ReplayFormat
from sim.profiles import find_profile
from sim.worker import WorkerLimits

Role = Literal["mixed", "prefill", "decode"]
Connector = Literal["nixl", "mooncake", "sglang", "lmcache"]
ROLES: Final = get_args(Role)
CONNECTORS: Final = get_args(Connector)

_LAST_PORT: Final = 65535

Script = Callable[[Sequence[int]], Sequence[int] | None]


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of one simulated worker.

    Attributes:
        model: name it serves.
        adapters: LoRA adapters it serves beside the model.
        tokenizer: folder with ``tokenizer.json`` and chat template; None: four bytes of text make a token.
        host: address it listens on.
        port: its HTTP port, 0 for any.
        api_key: what requests must bring as bearer token, except for health, metrics and the like; empty: nothing.
        profile: how fast it is, ``model/gpu/tensor-parallel`` of ``sim.profiles``.
        speed: how many times faster than that its clock runs.
        block_size: tokens per KV block.
        capacity_tokens: tokens of KV cache in HBM; the default is a 70B model's on four H100.
        host_tokens: tokens of KV cache in host memory, 0 for no host tier.
        max_model_len: longest prompt and output together; 0: as much as fits, at most 131,072.
        max_batched_tokens: tokens computed per engine step.
        max_running: requests in one batch.
        max_requests: requests at a time, waiting ones included; more are refused with 503. 0: no limit.
        output_tokens: length of an answer to a request without ``max_tokens``.
        stream_interval: tokens per chunk of a stream.
        prefix_caching: keep the KV cache of prompts for others that begin alike.
        prompt_tokens_details: report ``cached_tokens`` in usage.
        kv_events: ZMQ endpoint of the KV event publisher, ``tcp://host:port``; None for no events.
        kv_replay: ZMQ endpoint of the replay socket; None for no replays.
        kv_topic: topic of the events.
        kv_connect: connect the publisher to a subscriber that binds, as vLLM does for endpoints without ``*``.
        event_format: ``map`` as vLLM since 0.26, ``array`` as before.
        replay_format: ``topic`` (4 frames) as vLLM since 0.26, ``plain`` (3 frames) as before.
        role: what it does where prefill and decode are apart.
        pd: protocol by which it hands KV over; None: it cannot.
        link_gb_s: GB/s at which KV arrives.
        lease_s: how long it keeps KV that is to be fetched, and waits for KV that is to come.
        lmcache_proxy: with ``lmcache``: who is told that KV is written, ``tcp://host:port``; None: nobody.
        pull_back_s: with ``nixl``: how long it keeps the KV of an answer, prompt included, to be pulled by the prefill
            worker of the next turn, as vLLM with ``bidirectional_kv_xfer``; 0: it does not.
        faults: faults that hold from the start.
        script: for tests: given a prompt's ids, returns the output ids, or None for an invented answer.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    model: str = "sim"
    adapters: tuple[str, ...] = ()
    tokenizer: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = ""
    profile: str = "llama-3.1-70b/h100/4"
    speed: float = 1.0
    block_size: int = 16
    capacity_tokens: int = 461_376
    host_tokens: int = 0
    max_model_len: int = 0
    max_batched_tokens: int = 8192
    max_running: int = 256
    max_requests: int = 0
    output_tokens: int = 128
    stream_interval: int = 1
    prefix_caching: bool = True
    prompt_tokens_details: bool = True
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_topic: str = ""
    kv_connect: bool = False
    event_format: EventFormat = "map"
    replay_format: ReplayFormat = "topic"
    role: Role = "mixed"
    pd: Connector | None = None
    link_gb_s: float = 25.0
    lease_s: float = 30.0
    lmcache_proxy: str | None = None
    pull_back_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    script: Script | None = None

    def __post_init__(self) -> None:
        find_profile(self.profile)
        for name in ("block_size", "max_batched_tokens", "max_running", "output_tokens", "stream_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("host_tokens", "max_model_len", "max_requests"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if not 0 <= self.port <= _LAST_PORT:
            raise ValueError(f"port must be 0 (any) to {_LAST_PORT}, not {self.port}")
        if not 0 < self.speed < math.inf:
            raise ValueError(f"speed must be above 0 and finite, not {self.speed}")
        if self.capacity_tokens < self.block_size:
            raise ValueError(
                f"capacity_tokens must be at least one block ({self.block_size}), not {self.capacity_tokens}"
            )
        if self.capacity_tokens // self.block_size > MOST_BLOCKS:
            raise ValueError(
                f"capacity_tokens {self.capacity_tokens} are {self.capacity_tokens // self.block_size:,} blocks of "
                f"{self.block_size} tokens; at most {MOST_BLOCKS:,} can be simulated"
            )
        if self.max_model_len > self.usable_tokens:
            raise ValueError(f"max_model_len {self.max_model_len} exceeds the cache of {self.usable_tokens} tokens")
        if self.kv_replay is not None and self.kv_events is None:
            raise ValueError("kv_replay repeats what kv_events published: set kv_events too, or leave kv_replay out")
        for name in ("kv_events", "kv_replay"):
            port = re.fullmatch(r"tcp://.+:(\d+)", getattr(self, name) or "")
            if port and int(port[1]) > _LAST_PORT:  # ZMQ would take another port instead
                raise ValueError(f"{name} {getattr(self, name)}: ports go up to {_LAST_PORT}")
        self._check_hand_over()
        self._check_names()

    def _check_hand_over(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        if self.pd is not None and self.pd not in CONNECTORS:
            raise ValueError(f"pd must be one of {', '.join(CONNECTORS)}, not {self.pd!r}")
        if self.role != "mixed" and self.pd is None:
            raise ValueError(f"role {self.role} needs pd: the protocol by which KV is handed over")
        if not 0 < self.link_gb_s < math.inf or not 0 < self.lease_s < math.inf:
            raise ValueError("link_gb_s and lease_s must be above 0 and finite")
        if self.lmcache_proxy is not None and not re.fullmatch(r"tcp://.+:\d+", self.lmcache_proxy):
            raise ValueError(f"lmcache_proxy must be tcp://host:port, not {self.lmcache_proxy!r}")
        if not 0 <= self.pull_back_s < math.inf:
            raise ValueError(f"pull_back_s must be finite and not negative, but is {self.pull_back_s}")

    def _check_names(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty: name the model that the worker serves")
        names = {self.model}
        for adapter in self.adapters:
            if not adapter:
                raise ValueError("adapters must not be empty names: leave them out where there are none")
            if adapter in names:
                raise ValueError(f"adapters must differ from the model and from each other: {adapter!r} is taken")
            names.add(adapter)

    @property
    def usable_tokens(self) -> int:
        """Tokens of KV cache in HBM, whole blocks."""
        return self.capacity_tokens // self.block_size * self.block_size

    @property
    def context_tokens(self) -> int:
        """Longest prompt and output together."""
        return self.max_model_len or min(131_072, self.usable_tokens)

    @property
    def limits(self) -> WorkerLimits:
        """Size of the worker; the block that vLLM reserves comes on top of the capacity."""
        return WorkerLimits(
            num_blocks=self.capacity_tokens // self.block_size + 1,
            block_size=self.block_size,
            host_blocks=self.host_tokens // self.block_size,
            max_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            prefix_caching=self.prefix_caching,
        )
