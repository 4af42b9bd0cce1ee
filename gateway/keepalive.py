"""Peers that vanish without a word, as machines do that lose their power or their network."""

from __future__ import annotations

import socket
import sys
from typing import Final

_IDLE_S: Final = 20  # without a byte, until the first probe
_INTERVAL_S: Final = 5
_PROBES: Final = 4


def watch_peer(sock: socket.socket) -> None:
    """Have the kernel end a connection whose peer answers no more: after 40 s, also where nobody sends anything.

    Args:
        sock: of a connection, or of a listener, from which accepted connections take it over.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
