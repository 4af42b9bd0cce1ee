"""Start the product's commands as a user would, as processes, and end them again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from sim.ports import free_ports

__all__ = ["ROOT", "free_ports", "kvway", "running", "wait_for", "write_config"]

ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def running(command: Sequence[str | Path], **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, then SIGTERM, and SIGKILL if it does not obey."""
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=os.environ | environ)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def kvway(*words: str | Path) -> list[str | Path]:
    """The command line of a kvway command in this environment."""
    return [sys.executable, "-m", "gateway.cli", *words]


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float) -> httpx.Response:
    """Ask for ``url`` until it answers 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            response = httpx.get(url)
            if response.status_code == 200:
                return response
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer within {seconds} s")


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write a ``kvway.yaml``."""
    file = folder / "kvway.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
