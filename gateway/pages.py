"""Huge pages for the memory of a process that is ready to serve.

Between two requests other work takes the processor's caches, that of page addresses first, and in a virtual machine
each address costs two walks through page tables. With 2 MB pages there are few addresses to find again.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

_HUGE: Final = 2 * 2**20
_MADV_COLLAPSE: Final = 25  # since Linux 6.1; earlier kernels, and those without huge pages, refuse


def collapse_memory(maps: Path = Path("/proc/self/maps")) -> None:
    """Have the kernel put this process's memory, as it is now, on huge pages; where it cannot, nothing happens.

    Args:
        maps: what lists the memory; not there but on Linux.
    """
    try:
        lines = maps.read_text(errors="replace").splitlines()  # names of files may be in any encoding
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in lines:
        bounds, mode, _, _, inode, *name = line.split()
        if mode == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            first, last = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if first < last:
                madvise(first, last - first, _MADV_COLLAPSE)
