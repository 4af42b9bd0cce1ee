"""Ramp to saturation: twice the users step after step, until the target answers no more requests per second.

Beside the locustfile, ``locust -f …/locustfile.py,…/ramp.py``; in ``kvway load``, ``--ramp``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.stats import RequestStats, calculate_response_time_percentile, diff_response_time_dicts

_LEAST_GAIN: Final = 1.05
_STREAM: Final = ("TTFT", "stream")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the ramp: users, answers per second, and the 90th percentile of TTFT in seconds."""

    users: int
    requests_per_s: float
    ttft_p90_s: float


class _Counters:
    """What locust has counted up to a moment."""

    def __init__(self, stats: RequestStats, at: float) -> None:
        entry = stats.entries.get(_STREAM)
        self.at = at
        self.answers = entry.num_requests if entry else 0
        self.times = dict(entry.response_times) if entry else {}

    def step(self, before: _Counters, users: int) -> Step:
        """Return what happened between ``before`` and this moment."""
        answers = self.answers - before.answers
        times = diff_response_time_dicts(self.times, before.times)
        p90 = calculate_response_time_percentile(times, answers, 0.9) / 1e3 if answers else 0.0
        return Step(users, answers / (self.at - before.at), p90)


class RampToSaturation(LoadTestShape):
    """Doubles the users with every step; ends when that brought less than 5 % more answers per second.

    Options: ``--ramp-step`` seconds of a step, ``--ramp-most`` users at most.

    Attributes:
        steps: those that are over.
        is_ramp: tells it from shapes of others.
    """

    is_ramp = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._users = 1
        self._before: _Counters | None = None

    def tick(self) -> tuple[int, float] | None:
        """Return users and users started per second; None at the end."""
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        now = _Counters(self.runner.stats, self.get_run_time())  # type: ignore[no-untyped-call]
        if self._before is None:
            self.steps, self._users, self._before = [], 1, now
        elif now.at - self._before.at >= options.ramp_step:
            self.steps.append(now.step(self._before, self._users))
            self._before = now
            if self.is_saturated or self._users >= options.ramp_most:
                self._before = None
                return None
            self._users = min(2 * self._users, options.ramp_most)
        return self._users, float(self._users)

    @property
    def is_saturated(self) -> bool:
        """Whether the last step brought no more."""
        if len(self.steps) < 2:
            return False
        last, before = self.steps[-1].requests_per_s, self.steps[-2].requests_per_s
        return 0 < last < _LEAST_GAIN * before

    def summary(self) -> list[dict[str, float]]:
        """Return the steps as data."""
        return [asdict(step) for step in self.steps]


def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("kvway load, ramp")
    group.add_argument("--ramp-step", type=float, default=20.0, help="seconds of a step")
    group.add_argument("--ramp-most", type=int, default=1024, help="users at most")


events.init_command_line_parser.add_listener(_add_options)
