"""The memory of a process that is ready to serve."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.pages import collapse_memory

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


def huge_kb_after(calls: str) -> int:
    """Return the kilobytes on huge pages of a process that holds 64 MB in small pieces."""
    script = (
        "from pathlib import Path\n"
        "from gateway.pages import collapse_memory\n"
        "kept = [bytes([number % 256]) * 2**10 for number in range(2**16)]\n"
        f"{calls}\n"
        "assert all(piece == bytes([number % 256]) * 2**10 for number, piece in enumerate(kept))\n"
        "print(Path('/proc/self/smaps_rollup').read_text().split('AnonHugePages:')[1].split()[0])\n"
    )
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not SYSTEM.exists() or KERNEL < (6, 1), reason="this kernel cannot collapse memory")
def test_what_a_process_holds_is_put_on_huge_pages_unchanged() -> None:
    assert huge_kb_after("collapse_memory()") > huge_kb_after("") + 32 * 1024


def test_a_system_that_lists_no_memory_is_left_alone(tmp_path: Path) -> None:
    collapse_memory(tmp_path / "absent")


def test_files_may_have_names_that_are_no_text(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(b"7f0000000000-7f0000001000 r--p 00000000 fe:00 12 /opt/mod\xe8les/libcaf\xe9.so\n")
    collapse_memory(maps)
