"""What KV cache costs to hold, to recompute and to move; seconds, bytes and tokens throughout.

The first half are formulas of a model and its hardware, for planning and for checking what was measured. The second
half is what policies evaluate for every request: the fitted prefill time and the time to reload from a lower tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from policies.base import Floats

Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the formulas need to know of a transformer.

    Attributes:
        parameters: active parameters per token.
        layers: transformer layers.
        query_heads: attention heads.
        kv_heads: heads of K and V (fewer than ``query_heads`` under grouped-query attention).
        head_dim: dimension of a head.
        element_bytes: bytes of one cached element, 2 for fp16 and bf16, 1 for fp8.
    """

    parameters: float
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    element_bytes: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token over all layers: ``2·L·H_kv·D_h·P``."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


LLAMA_3_70B = ModelShape(parameters=70e9, layers=80, query_heads=64, kv_heads=8, head_dim=128)


def kv_bytes(shape: ModelShape, tokens: int, batch: int = 1) -> float:
    """Return the KV footprint of ``batch`` sequences of ``tokens`` tokens: ``2·L·H_kv·D_h·S·B·P``."""
    return shape.kv_bytes_per_token * tokens * batch


def paged_kv_bytes(shape: ModelShape, tokens: int, block_tokens: int, batch: int = 1) -> float:
    """Return what a paged allocator takes for them: every sequence is rounded up to whole blocks."""
    blocks = -(-tokens // block_tokens)
    return kv_bytes(shape, blocks * block_tokens, batch)


def recompute_seconds(shape: ModelShape, tokens: int, flops: float, attention: bool = True) -> float:
    """Return the prefill time of ``tokens`` tokens from nothing: ``(2·N·S + 4·L·H_q·D_h·S²) / FLOPS``.

    Args:
        shape: the model.
        tokens: S.
        flops: attainable floating-point operations per second, not the data sheet's.
        attention: include the quadratic term; it is small below some 40,000 tokens of an 8B model.
    """
    work = 2.0 * shape.parameters * tokens
    if attention:
        work += 4.0 * shape.layers * shape.query_heads * shape.head_dim * tokens**2
    return work / flops


def transfer_seconds(size_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the time to bring ``size_bytes`` from a tier: ``α + M/B``."""
    return latency_s + size_bytes / bytes_per_s


def break_even_bytes_per_s(shape: ModelShape, flops: float) -> float:
    """Return the tier bandwidth above which reloading beats recomputing: ``FLOPS·L·H_kv·D_h·P / N``.

    It does not depend on the number of tokens, because only the linear term of the prefill counts here.
    """
    return flops * shape.kv_bytes_per_token / (2.0 * shape.parameters)


def expected_benefit_s(reuse: float, recompute_s: float, transfer_s: float) -> float:
    """Return the seconds that keeping or fetching a prefix is worth: ``P(reuse)·(T_recompute − T_transfer)``."""
    return reuse * (recompute_s - transfer_s)


def prefill_seconds(new: Number, cached: Number, a_s: Number, b_s: Number, c_s: Number) -> Number:
    """Return ``T_prefill(n, p) = a + b·n + c·n·(p + n/2)``; numbers, or arrays that broadcast.

    The last term is attention: every new token attends to the cached prefix and, on average, to half of the new ones.
    Kernel estimates for dense models are met within 6 % on average (Llama 8B and 70B, Qwen3 32B; A100 to B200).

    Args:
        new: n, tokens to prefill.
        cached: p, tokens before them whose KV cache is there.
        a_s: fixed seconds.
        b_s: seconds per new token.
        c_s: seconds per new token and context token.
    """
    return a_s + new * (b_s + c_s * (cached + new * 0.5))


def reload_seconds(
    host: Number, disk: Number, remote: Number, host_s: Number, disk_s: Number, remote_s: Number
) -> Number:
    """Return the seconds to bring tokens that lie below HBM back into it; numbers, or arrays that broadcast.

    Args:
        host: tokens held in host memory and not above it; likewise the others.
        disk: tokens on disk.
        remote: tokens in the remote pool.
        host_s: seconds per token from host memory; likewise the others.
        disk_s: seconds per token from disk.
        remote_s: seconds per token from the remote pool.
    """
    return host * host_s + disk * disk_s + remote * remote_s
