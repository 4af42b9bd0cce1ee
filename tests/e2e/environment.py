"""Make virtual environments with real engines, for machines without a GPU."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

TORCH = "2.13.0"


class Environment:
    """A virtual environment at ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def install(self, *words: str) -> None:
        """Run ``pip install`` with ``words``."""
        pip = [str(self.root / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *words], check=True)


def make(engine: str, fill: Callable[[Environment], None]) -> None:
    """Make the environment that the command line names, with torch in it, unless that has been done before.

    Args:
        engine: what ``fill`` installs, with its version: another one makes the environment anew.
        fill: installs it.
    """
    root = Path(sys.argv[1]).resolve()
    done = root / f"{engine}.ready"
    if done.exists():
        return
    venv.create(root, with_pip=True, clear=True)
    environment = Environment(root)
    environment.install(f"torch=={TORCH}")
    fill(environment)
    done.touch()
