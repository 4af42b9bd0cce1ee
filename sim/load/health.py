"""The load generator watches itself: a client without CPU to spare measures its own queues."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Final

import gevent

_TICK_S: Final = 0.02
_WINDOW_S: Final = 1.0
_MOST_WINDOWS: Final = 100_000
MOST_CPU: Final = 0.9
MOST_LAG_S: Final = 0.02

_log = logging.getLogger("kvway.load")


@dataclass(frozen=True, slots=True)
class Window:
    """A second of the client.

    Attributes:
        at: end, on the clock of ``perf_counter``.
        cpu: share of one core that the process used.
        lag_s: longest time by which its event loop woke up too late.
        users: locust users that ran.
    """

    at: float
    cpu: float
    lag_s: float
    users: int

    @property
    def saturated(self) -> bool:
        """Whether the client was at its limit, or others took its core: what was measured then is too slow."""
        return self.cpu > MOST_CPU or self.lag_s > MOST_LAG_S


class ClientWatch:
    """Measures CPU and event-loop lag of this process, second after second, in a greenlet.

    Args:
        users: returns how many users run.

    Attributes:
        windows: the seconds so far; the oldest go after a day.
    """

    def __init__(self, users: Callable[[], int]) -> None:
        self.windows: deque[Window] = deque(maxlen=_MOST_WINDOWS)
        self._users = users
        self._greenlet = gevent.spawn(self._watch)

    def stop(self) -> None:
        """End the greenlet."""
        self._greenlet.kill()

    def _watch(self) -> None:
        warned = False
        while True:
            window = self._window()
            self.windows.append(window)
            if window.saturated and not warned:
                warned = True
                _log.warning("the load generator is saturated (%s); use more processes", describe(window))

    def _window(self) -> Window:
        began, cpu = perf_counter(), process_time()
        now, lag_s = began, 0.0
        while now - began < _WINDOW_S:
            gevent.sleep(_TICK_S)
            woken = perf_counter()
            lag_s = max(lag_s, woken - now - _TICK_S)
            now = woken
        return Window(now, (process_time() - cpu) / (now - began), lag_s, self._users())


def describe(window: Window) -> str:
    """Return a window's CPU and lag as words."""
    return f"{window.cpu:.0%} of a core, woken up to {window.lag_s * 1e3:.0f} ms late"
