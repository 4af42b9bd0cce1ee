"""What models and GPUs are: shapes for the formulas of ``policies.cost``, and the memory that is left for KV cache."""

from __future__ import annotations

from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from policies.cost import LLAMA_3_70B, ModelShape

GIB: Final = 2**30

SHAPES: Final = MappingProxyType(
    {
        "llama-3.1-8b": ModelShape(8.03e9, layers=32, query_heads=32, kv_heads=8, head_dim=128),
        "llama-3.1-70b": LLAMA_3_70B,
        "qwen3-32b": ModelShape(32.8e9, layers=64, query_heads=64, kv_heads=8, head_dim=128),
        "qwen3-30b-a3b": ModelShape(3.3e9, layers=48, query_heads=32, kv_heads=4, head_dim=128),
    }
)

PRECISIONS: Final = MappingProxyType({"fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int4": 0.5})

# All parameters, not only the active ones: what the weights occupy.
_STORED_PARAMETERS: Final = MappingProxyType(
    {"llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9, "qwen3-32b": 32.8e9, "qwen3-30b-a3b": 30.5e9}
)
_GPU_BYTES: Final = MappingProxyType({"h100": 80 * GIB, "h200": 140 * GIB, "a100": 80 * GIB, "b200": 179 * GIB})
_USABLE_SHARE: Final = 0.9  # vLLM's gpu_memory_utilization
_ACTIVATION_BYTES: Final = 4 * GIB  # per GPU: activations of a full step and captured graphs


def find_shape(model: str) -> ModelShape:
    """Return a model's shape by its name.

    Raises:
        ValueError: it is not known; the message names the nearest and all others.
    """
    shape = SHAPES.get(model)
    if shape is None:
        near = get_close_matches(model, SHAPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown model {model!r}.{hint} Known models: {', '.join(SHAPES)}.")
    return shape


def kv_capacity_tokens(profile: str) -> int:
    """Return the tokens of KV cache that fit into HBM beside bf16 weights, for a profile ``model/gpu/tensor-parallel``.

    Two fleets of which it was published are met within 1 %: Qwen3-32B on two H100, 307,328 tokens, and Llama 70B on
    four, 461,376.
    """
    model, gpu, count = profile.split("/")
    per_gpu = _GPU_BYTES[gpu] * _USABLE_SHARE - _ACTIVATION_BYTES
    free = per_gpu * int(count) - 2 * _STORED_PARAMETERS[model]
    return int(free / SHAPES[model].kv_bytes_per_token)
