"""What requests of our own bring to workers that ask for an API key; those of clients bring what their clients sent."""

from __future__ import annotations

import re
from typing import Final

from gateway.config_workers import WorkerSettings

_KEY: Final = re.compile(r"[!-~]+")


def credentials(worker: WorkerSettings) -> dict[str, str]:
    """Return the headers that a worker's API key makes; none where it has no key, or its file cannot be read.

    The file is read each time: keys are exchanged under running gateways. A worker that refuses us for want of a key
    says so itself, by status 401.
    """
    if worker.api_key_file is None:
        return {}
    try:
        key = worker.api_key_file.read_text("ascii").strip()
    except (OSError, UnicodeError):
        return {}
    return {"authorization": f"Bearer {key}"} if _KEY.fullmatch(key) else {}
