"""Who sends what when: the units of a scenario, handed to the users of one locust process."""

from __future__ import annotations

from time import perf_counter

from gevent.event import Event

from sim.load.scenario import Scenario, Unit


class Schedule:
    """The units that this process plays, in order.

    Args:
        scenario: of the whole test.
        part: number of this process, from 0.
        parts: processes that share the scenario; each plays every ``parts``-th unit.
    """

    def __init__(self, scenario: Scenario, part: int = 0, parts: int = 1) -> None:
        self.scenario = scenario
        self._units = iter(scenario.units[part::parts])
        self._closed = Event()
        self._began: float | None = None

    def take(self) -> tuple[Unit, float] | None:
        """Return the next unit and when it is due on the clock of ``perf_counter``; None when there is none left."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        unit = None if self._closed.is_set() else next(self._units, None)
        if unit is None:
            return None
        return unit, (self._began + unit.due_s if self.scenario.paced else now)

    def wait(self, until: float) -> bool:
        """Wait for a moment of ``perf_counter``; return False when the test ends before."""
        if (seconds := until - perf_counter()) > 0:
            self._closed.wait(seconds)
        return not self._closed.is_set()

    def close(self) -> None:
        """End the test: what was sent is answered, nothing more is sent."""
        self._closed.set()
