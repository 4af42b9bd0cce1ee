"""Make a virtual environment with a real LMCache for machines without a GPU: ``python -m tests.e2e.setup_lmcache DIR``.

Its coordinator and its cache server run without CUDA; of what the wheel asks for, only what they import is installed.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

LMCACHE = "0.5.6"
TORCH = "2.13.0"
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


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    done = root / f"lmcache-{LMCACHE}.ready"
    if done.exists():
        return
    venv.create(root, with_pip=True, clear=True)
    pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={TORCH}", *NEEDED], check=True)
    subprocess.run([*pip, "--no-deps", f"lmcache=={LMCACHE}"], check=True)
    done.touch()


if __name__ == "__main__":
    main()
