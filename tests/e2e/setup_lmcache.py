"""Make a virtual environment with a real LMCache for machines without a GPU: ``python -m tests.e2e.setup_lmcache DIR``.

Its coordinator and its cache server run without CUDA; of what the wheel asks for, only what they import is installed.
"""

from __future__ import annotations

from tests.e2e.environment import Environment, make

LMCACHE = "0.5.6"
NEEDED = (
    "aiofile",
    "aiofiles",
    "aiohttp",
    "blake3",
    "cachetools",
    "cryptography",
    "fastapi",
    "grpcio",
    "httptools",
    "httpx",
    "huggingface_hub>=1.5.0",
    "msgspec",
    "numba",
    "numpy<=2.2.6",
    "nvtx",
    "opentelemetry-api==1.40.0",
    "opentelemetry-exporter-otlp==1.40.0",
    "opentelemetry-exporter-prometheus==0.61b0",
    "opentelemetry-sdk==1.40.0",
    "prometheus_client",
    "protobuf<7",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "redis",
    "safetensors",
    "setuptools<81",
    "sortedcontainers",
    "transformers>=5.4",
    "uvicorn",
)


def fill(environment: Environment) -> None:
    """Install LMCache."""
    environment.install(*NEEDED)
    environment.install("--no-deps", f"lmcache=={LMCACHE}")


if __name__ == "__main__":
    make(f"lmcache-{LMCACHE}", fill)
