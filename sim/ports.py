"""Ports for processes of a fleet on one machine."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

BELOW_EPHEMERAL: Final = range(12_000, 32_000)
"""The kernel gives these to nobody by itself, so no outgoing connection can take one before its process binds it."""


def free_ports(count: int) -> list[int]:
    """Return ``count`` neighbouring ports of the loopback interface that nobody listens on."""
    while True:
        first = random.randrange(BELOW_EPHEMERAL.start, BELOW_EPHEMERAL.stop - count)
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
