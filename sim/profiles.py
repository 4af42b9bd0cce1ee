"""How fast workers are: fitted times per model, GPU and tensor parallelism, and the bandwidth of the tiers.

``TTFT = a + b·n + c·n·(p + n/2)`` for ``n`` new tokens behind ``p`` cached ones, and ``ITL = d0 + d1·B + d2·ΣC`` for a
batch of ``B`` requests with ``ΣC`` tokens of context between them. Both were fitted by weighted least squares to the
kernel tables of AIConfigurator 0.12.0 (vLLM 0.24.0, bf16): within 0.6 to 5.7 % for prefill and 1 to 3.8 % for decode of
dense models. Decode of mixtures of experts is not linear in ``B``: 21 to 23 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

_MOST_S: Final = 3600.0


@dataclass(slots=True, frozen=True)
class Profile:
    """Speed of one worker.

    Attributes:
        prefill_a_s: fixed seconds of a step that prefills.
        prefill_b_s: seconds per new token.
        prefill_c_s: seconds per (new token · token of context).
        decode_d0_s: fixed seconds of a step that decodes.
        decode_d1_s: seconds per decoding request.
        decode_d2_s: seconds per token of context of the decoding requests.
        kv_bytes_per_token: ``2·L·H_kv·D_h·P`` bytes, keys and values of all layers.
        gpus: GPUs that share the model; host bandwidth grows with them.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    prefill_a_s: float
    prefill_b_s: float
    prefill_c_s: float
    decode_d0_s: float
    decode_d1_s: float
    decode_d2_s: float
    kv_bytes_per_token: int
    gpus: int

    def __post_init__(self) -> None:
        for name in ("prefill_a_s", "prefill_b_s", "prefill_c_s", "decode_d0_s", "decode_d1_s", "decode_d2_s"):
            if not 0 <= getattr(self, name) <= _MOST_S:
                raise ValueError(f"profile: {name} must be between 0 and {_MOST_S:g} s, not {getattr(self, name)}")
        for name in ("prefill_b_s", "decode_d0_s"):
            if not getattr(self, name):
                raise ValueError(f"profile: {name} must be above 0: a step that computes takes time")
        for name in ("kv_bytes_per_token", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"profile: {name} must be at least 1, not {getattr(self, name)}")

    def step_s(self, prefills: Iterable[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        """Return the seconds of one engine step.

        A step of one whole prompt takes the TTFT above, a step of decodes alone the ITL. In a mixed step the weights
        are read once for everybody, so the fixed part is paid once (the larger of ``a`` and ``d0``); everything that
        grows with tokens adds up.

        Args:
            prefills: ``(new tokens, tokens already computed)`` of each prefill chunk in the step.
            decodes: number of requests that decode one token.
            context_tokens: tokens of context of those requests together.
        """
        seconds = 0.0
        fixed = self.decode_d0_s if decodes else 0.0
        for new, computed in prefills:
            fixed = max(fixed, self.prefill_a_s)
            seconds += new * (self.prefill_b_s + self.prefill_c_s * (computed + new / 2))
        return fixed + seconds + decodes * self.decode_d1_s + context_tokens * self.decode_d2_s

    def ttft_s(self, new: int, cached: int = 0) -> float:
        """Return the seconds that one prompt takes alone, in one step: ``new`` tokens behind ``cached`` ones."""
        return self.step_s([(new, cached)], 0, 0)

    def itl_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of one decode step of ``batch`` requests with ``context_tokens`` between them."""
        return self.step_s((), batch, context_tokens)


@dataclass(slots=True, frozen=True)
class Link:
    """What it takes to bring KV back: effective bytes per second, and seconds before the first of them."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, size: float) -> float:
        """Return the seconds that ``size`` bytes take."""
        return self.latency_s + size / self.bytes_per_s


# Effective, as measured by the projects that published them; host DRAM is per GPU, one way.
LINKS: Final = MappingProxyType(
    {
        "host": Link(45e9, 1e-3),
        "nvme-gen4": Link(7e9, 80e-6),
        "nvme-gen3": Link(3.5e9, 100e-6),
        "sata": Link(0.55e9, 150e-6),
        "s3": Link(1e9, 30e-3),
        "nvlink": Link(600e9, 0.5e-3),
        "infiniband-400g": Link(40e9, 2e-3),
        "roce-200g": Link(20e9, 2e-3),
        "roce-100g": Link(10e9, 2e-3),
        "ethernet-25g": Link(2.5e9, 10e-3),
    }
)

NETWORK_LINKS: Final = ("nvlink", "infiniband-400g", "roce-200g", "roce-100g", "ethernet-25g")
"""Of these, the links between workers."""

_KV_BYTES: Final = MappingProxyType(
    {
        "llama-3.1-8b": 131_072,
        "llama-3.1-70b": 327_680,
        "qwen3-32b": 262_144,
        "qwen3-30b-a3b": 98_304,  # 2 · 48 layers · 4 KV heads · 128 · 2 bytes
    }
)

# model/gpu/tensor-parallel: a ms, b us/token, c ns/(token·token), d0 ms, d1 us/request, d2 ns/token
_FITS: Final = MappingProxyType(
    {
        "llama-3.1-8b/h100/1": (4.28, 18.29, 0.834, 6.36, 9.5, 41.91),
        "llama-3.1-8b/h200/1": (3.04, 18.84, 0.839, 4.93, 9.7, 29.62),
        "llama-3.1-8b/a100/1": (7.43, 54.66, 2.987, 11.71, 22.8, 85.55),
        "llama-3.1-8b/b200/1": (2.67, 9.23, 0.431, 3.41, 3.9, 18.01),
        "llama-3.1-70b/h100/4": (10.87, 57.92, 1.052, 15.19, 32.3, 26.69),
        "llama-3.1-70b/h100/8": (8.40, 37.37, 0.514, 10.12, 22.6, 13.51),
        "llama-3.1-70b/h200/4": (7.62, 59.31, 1.058, 12.27, 31.7, 18.61),
        "llama-3.1-70b/a100/4": (19.53, 152.72, 3.661, 27.70, 104.5, 54.56),
        "qwen3-32b/h100/1": (16.39, 80.76, 3.524, 25.16, 30.7, 85.04),
        "qwen3-32b/h100/2": (10.59, 45.98, 1.680, 13.55, 25.8, 42.25),
        "qwen3-32b/h200/1": (11.07, 82.28, 3.419, 18.62, 34.4, 61.15),
        "qwen3-32b/h200/2": (8.20, 46.22, 1.715, 10.66, 24.7, 29.57),
        "qwen3-30b-a3b/h100/1": (23.00, 10.58, 1.229, 5.29, 111.5, 41.33),
        "qwen3-30b-a3b/h200/1": (17.82, 9.67, 1.240, 4.66, 84.4, 28.90),
    }
)


def _profile(name: str, fit: tuple[float, float, float, float, float, float]) -> Profile:
    model, _, gpus = name.split("/")
    a_ms, b_us, c_ns, d0_ms, d1_us, d2_ns = fit
    return Profile(
        a_ms * 1e-3, b_us * 1e-6, c_ns * 1e-9, d0_ms * 1e-3, d1_us * 1e-6, d2_ns * 1e-9, _KV_BYTES[model], int(gpus)
    )


PROFILES: Final = MappingProxyType({name: _profile(name, fit) for name, fit in _FITS.items()})


def find_profile(name: str) -> Profile:
    """Return a profile by its name, ``model/gpu/tensor-parallel``.

    Raises:
        ValueError: there is none; the message names the nearest and all others.
    """
    profile = PROFILES.get(name)
    if profile is None:
        near = get_close_matches(name, PROFILES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown profile {name!r}.{hint} Known profiles: {', '.join(PROFILES)}.")
    return profile
