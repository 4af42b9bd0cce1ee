"""Prometheus metrics in their text form, written for a process that must not pause.

The client library renders some 50 times slower: a fleet of a hundred workers would hold up every stream for a tenth
of a second at each scrape. Its process metrics are used as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

Kind = Literal["counter", "gauge", "histogram"]

Values = float | Mapping[str, float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, str, str], float]
"""One number; or one per label value, or per pair of label values."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def label_text(**labels: str) -> str:
    """Return labels as they stand between the braces of a sample."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())


class Histogram:
    """Counts per bucket.

    Args:
        bounds: upper bounds of the buckets, ascending; one more, +Inf, is implied.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, labels: str) -> Iterable[str]:
        """Yield the lines of this histogram in a family called ``name``."""
        before, total = f"{labels}," if labels else "", 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{before}le="{bound}"}} {total}'
        yield f"{name}_count{{{labels}}} {total}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


@dataclass(slots=True, frozen=True)
class _Reading:
    kind: Kind
    name: str
    help: str
    read: Callable[[], Values]
    labels: Sequence[str]


class Exposition:
    """What a scrape returns: families that someone else writes, readings registered here, and the process."""

    def __init__(self) -> None:
        self._readings: dict[str, _Reading] = {}
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def add(self, kind: Kind, name: str, about: str, read: Callable[[], Values], labels: Sequence[str]) -> None:
        """Expose what ``read`` returns at each scrape, under as many ``labels`` as its keys have parts.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._readings:
            raise ValueError(f"metric {name!r} exists already")
        self._readings[name] = _Reading(kind, name, about, read, labels)

    def render(self, families: Iterable[str]) -> bytes:
        """Return the text format: the lines given, then all readings, then the process."""
        lines = list(families)
        for reading in self._readings.values():
            lines += family(reading.kind, reading.name, reading.help, _samples(reading))
        return "\n".join([*lines, ""]).encode() + generate_latest(self._process)


def family(kind: Kind, name: str, about: str, samples: Iterable[str]) -> Iterable[str]:
    """Yield the lines of one metric family."""
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    yield from samples


def _samples(reading: _Reading) -> Iterable[str]:
    values = reading.read()
    if not isinstance(values, Mapping):
        yield f"{reading.name} {values}"
        return
    for key, value in values.items():
        labels = (key,) if isinstance(key, str) else key
        yield f"{reading.name}{{{label_text(**dict(zip(reading.labels, labels, strict=True)))}}} {value}"
