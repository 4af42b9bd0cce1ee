"""What ``kvway load`` keeps of a test: a row per request, all gaps between chunks in a histogram, and failures."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from policies.base import Floats
from sim.load.health import Window
from sim.load.stream import ANSWER, Answer

_BIN_WIDTH: Final = 1.01  # bins of the gaps are 1 % wide
_LEAST_GAP_S: Final = 1e-5
_BINS: Final = 2_000
_MOST_ERRORS: Final = 50  # kinds of failures kept apart

COLUMNS: Final = (
    "sent_s",
    "late_s",
    "ttft_s",
    "latency_s",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ok",
)  # fmt: skip


class Recorder:
    """Listens to locust's request event.

    Args:
        began: beginning of the test on the clock of ``perf_counter``.

    Attributes:
        answered: requests that were answered.
        errors: failures by message.
    """

    def __init__(self, began: float) -> None:
        self.answered = 0
        self.errors: Counter[str] = Counter()
        self._began = began
        self._columns = {name: array("d") for name in COLUMNS}
        self._gaps = np.zeros(_BINS, np.int64)
        self._reports_hits = False

    def on_request(self, context: dict[str, Any], exception: Exception | None, **_: Any) -> None:
        """Keep a request; see ``locust.event.Events.request``."""
        answer = context.get(ANSWER)
        if not isinstance(answer, Answer):
            return  # a metric of a request
        row = (
            answer.sent - self._began,
            answer.late_s,
            float("nan") if answer.ttft_s is None else answer.ttft_s,
            answer.latency_s,
            answer.prompt_tokens,
            answer.cached_tokens or 0,
            answer.output_tokens,
            exception is None,
        )
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        if exception is not None:
            message = str(exception)
            self.errors[message if message in self.errors or len(self.errors) < _MOST_ERRORS else "others"] += 1
            return
        self.answered += 1
        self._reports_hits |= answer.cached_tokens is not None
        if answer.gaps_s:  # all at once: other streams wait for their next chunk meanwhile
            self._gaps += np.bincount(_bins(np.array(answer.gaps_s)), minlength=_BINS)

    def columns(self) -> dict[str, Floats]:
        """Return ``COLUMNS`` as arrays, a row per request in the order of their ends."""
        return {name: np.array(values) for name, values in self._columns.items()}

    def gap_quantiles(self, shares: Floats) -> Floats:
        """Return quantiles of the times between chunks in seconds, true to 1 %; NaN without any."""
        total = self._gaps.sum()
        if not total:
            return np.full(len(shares), np.nan)
        positions = np.searchsorted(np.cumsum(self._gaps), np.maximum(1, shares * total))
        return np.asarray(_LEAST_GAP_S * _BIN_WIDTH ** (positions + 0.5))

    def summary(self) -> dict[str, Any]:
        """Return the figures: times in seconds; None for what was not measured."""
        rows = self.columns()
        ok = rows["ok"] > 0
        seconds = float((rows["sent_s"] + rows["latency_s"]).max(initial=0.0))
        prompts, cached, outputs = (rows[f"{name}_tokens"][ok].sum() for name in ("prompt", "cached", "output"))
        found: dict[str, Any] = {
            "requests": len(ok),
            "answered": int(ok.sum()),
            "failed": int((~ok).sum()),
            "seconds": seconds,
            "requests_per_s": float(ok.sum()) / seconds if seconds else 0.0,
            "output_tokens_per_s": float(outputs) / seconds if outputs else None,
            "prompt_tokens": int(prompts) if prompts else None,
            "hit_rate": float(cached / prompts) if self._reports_hits and prompts else None,
        }
        for name, column in (("ttft", "ttft_s"), ("latency", "latency_s"), ("late", "late_s")):
            found |= _percentiles(name, rows[column][ok])
        found |= _named("itl", self.gap_quantiles(np.array([0.5, 0.9, 0.99])))
        return found | {"errors": dict(self.errors.most_common())}


def _bins(gaps_s: Floats) -> npt.NDArray[np.int64]:
    widths = np.log(np.maximum(gaps_s, _LEAST_GAP_S) / _LEAST_GAP_S) / np.log(_BIN_WIDTH)
    return np.asarray(np.minimum(widths.astype(np.int64), _BINS - 1))


def _percentiles(name: str, values: Floats) -> dict[str, float | None]:
    return _named(name, np.percentile(values, (50, 90, 99)) if len(values) else np.full(3, np.nan))


def _named(name: str, values: Floats) -> dict[str, float | None]:
    keys = (f"{name}_p50_s", f"{name}_p90_s", f"{name}_p99_s")
    return {key: None if np.isnan(value) else float(value) for key, value in zip(keys, values, strict=True)}


def client_summary(windows: list[Window]) -> dict[str, Any]:
    """Return how the load generator did: how long it was saturated, its CPU, and how late it woke up."""
    return {
        "seconds": len(windows),
        "saturated_s": sum(window.saturated for window in windows),
        "cpu_most": max((window.cpu for window in windows), default=0.0),
        "lag_most_s": max((window.lag_s for window in windows), default=0.0),
    }
