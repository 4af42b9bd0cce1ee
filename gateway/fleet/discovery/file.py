"""Workers from a file that is read anew when it changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import ValidationError

from gateway.config_source import describe_mistakes, read_yaml
from gateway.config_workers import FileConfig, WorkersFile
from gateway.errors import ConfigError
from gateway.fleet.discovery.found import Found, Reporter

_Stamp = tuple[int, int, int]


class FileSource:
    """Looks at a file again and again. Content that is not valid changes nothing.

    Args:
        config: which file, and how often it is looked at.
    """

    def __init__(self, config: FileConfig) -> None:
        self._path = config.path
        self._interval_s = config.interval_s

    async def run(self, report: Reporter) -> None:
        """See ``Source``."""
        seen: _Stamp | None = None
        found: list[Found] = []
        while True:
            try:
                stamp = await asyncio.to_thread(_stamp, self._path)
                if stamp != seen:
                    workers = await asyncio.to_thread(read_workers, self._path)
                    found, seen = [Found(worker) for worker in workers.workers], stamp
                report.found(found)  # also unchanged: the file is there, and has been looked at
            except ConfigError as error:
                report.failed(str(error))
            except OSError as error:
                report.failed(f"{self._path}: cannot be read: {error.strerror or error}")
            await asyncio.sleep(self._interval_s)


def read_workers(path: Path) -> WorkersFile:
    """Read a file of workers.

    Raises:
        ConfigError: it cannot be read or parsed, or a key or value is wrong. One line per mistake.
    """
    try:
        return WorkersFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError("\n".join(describe_mistakes(error, WorkersFile, str(path), {}))) from None


def _stamp(path: Path) -> _Stamp:
    """Tell contents apart. The inode does where a ConfigMap's symbolic link is swapped for one to an older file."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
