"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_writable(path: Path) -> None:
    """Refuse a path that could not be written, before an hour is spent on what should go there.

    Raises:
        ValueError: its folder is not there or not writable, or it is a folder itself, or too long.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            raise ValueError(f"{path}: the folder {folder} does not exist")
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; name a file in it")
        if _is_elsewhere(path):
            if path.exists() and not os.access(path, os.W_OK):
                raise ValueError(f"{path}: cannot be written to")
            return
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{path}: the folder {folder} cannot be written to")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_prefix(path)):
            pass
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name beside it, then give it its own: nobody ever sees half of it.

    A device, a pipe or what a link leads to is written as it is: it must not give way to a file.

    Raises:
        ValueError: it cannot be written; what was there before is there still.
    """
    try:
        if _is_elsewhere(path):
            path.write_bytes(content)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
        try:
            with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o666 & ~_umask())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def _is_elsewhere(path: Path) -> bool:
    """Whether a name stands for something else than a file in its folder."""
    return path.is_symlink() or path.is_char_device() or path.is_block_device() or path.is_fifo() or path.is_socket()


def _prefix(path: Path) -> str:
    return f".{path.name}."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
