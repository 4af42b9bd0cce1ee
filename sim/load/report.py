"""The result of a load test as HTML, CSV and a table."""

from __future__ import annotations

import csv
import io
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from policies.base import Floats
from sim.load.recorder import COLUMNS
from sim.page import new_figure, page, plain_numbers, plotting, section, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.load.headless import LoadResult

_BINS: Final = 60  # of plots over time
_LATE_S: Final = 0.1  # later than this is worth a remark
_CURVE: Final = np.linspace(0.0, 1.0, 200)

SHOWN: Final = (
    ("requests answered", "answered", 1, "{:,.0f}"),
    ("requests failed", "failed", 1, "{:,.0f}"),
    ("seconds", "seconds", 1, "{:,.1f}"),
    ("requests/s", "requests_per_s", 1, "{:,.2f}"),
    ("output tokens/s", "output_tokens_per_s", 1, "{:,.0f}"),
    ("hit rate", "hit_rate", 1, "{:.1%}"),
    ("TTFT p50, ms", "ttft_p50_s", 1e3, "{:,.1f}"),
    ("TTFT p90, ms", "ttft_p90_s", 1e3, "{:,.1f}"),
    ("TTFT p99, ms", "ttft_p99_s", 1e3, "{:,.1f}"),
    ("ITL p50, ms", "itl_p50_s", 1e3, "{:,.2f}"),
    ("ITL p90, ms", "itl_p90_s", 1e3, "{:,.2f}"),
    ("ITL p99, ms", "itl_p99_s", 1e3, "{:,.2f}"),
    ("whole answer p50, s", "latency_p50_s", 1, "{:,.2f}"),
    ("whole answer p99, s", "latency_p99_s", 1, "{:,.2f}"),
    ("sent late p99, ms", "late_p99_s", 1e3, "{:,.1f}"),
)


def figures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of what people want to see of ``LoadResult.summary``."""
    return [
        (name, "not reported" if summary[key] is None else form.format(summary[key] * factor))
        for name, key, factor, form in SHOWN
    ]


def remarks(summary: dict[str, Any]) -> list[str]:
    """Return what must be known before the figures are believed."""
    client = summary["client"]
    found = [f"{number} × {message}" for message, number in summary["errors"].items()]
    if summary.get("saturated") is False:
        found.append("the ramp ended before the endpoint was saturated; take a longer scenario or a higher --ramp-most")
    if client["saturated_s"]:
        found.append(
            f"the load generator was saturated in {client['saturated_s']} of {client['seconds']} s (up to "
            f"{client['cpu_most']:.0%} of a core, woken up to {client['lag_most_s'] * 1e3:.0f} ms late): its own delay "
            "is in the times; send less, or use locust with several processes"
        )
    if summary["late_p99_s"] is not None and summary["late_p99_s"] > _LATE_S:
        found.append(
            f"requests were sent up to {summary['late_p99_s']:.2f} s (p99) after they were due: all users were busy; "
            "take more users for an open loop"
        )
    return found


def as_csv(result: LoadResult) -> str:
    """Return a row per request; what a failed one did not see is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in zip(*result.recorder.columns().values(), strict=True):
        writer.writerow("" if np.isnan(value) else f"{value:.6f}".rstrip("0").rstrip(".") for value in row)
    return text.getvalue()


def render(result: LoadResult) -> str:
    """Return the page; it refers to nothing outside itself."""
    summary, rows = result.summary, result.recorder.columns()
    answered = {name: column[rows["ok"] > 0] for name, column in rows.items()}
    with plotting():
        parts = [
            table(("", summary["model"]), figures(summary)),
            *(f"<p><b>{text}</b></p>" for text in map(escape, remarks(summary))),
        ]
        if ramp := summary.get("ramp"):
            parts.append("<h2>Ramp</h2>\n" + _ramp(ramp))
        if len(answered["ttft_s"]):
            parts += [
                section("Time to first token", "Share of requests that had their first token by then.",
                        _curve(np.quantile(answered["ttft_s"], _CURVE), "TTFT, s", "share of requests")),
                section("Time to first token over time", "By the time at which requests were sent.", _ttfts(answered)),
                section("Throughput", "Answers that ended, per second, and users.", _throughput(answered, result)),
            ]  # fmt: skip
            gaps = result.recorder.gap_quantiles(_CURVE)
            if not np.isnan(gaps[0]):
                about = "Share of the times between two chunks of an answer."
                parts.append(section("Inter-token latency", about, _curve(gaps, "ITL, s", "share of gaps")))
        if result.windows:
            about = "CPU of the load generator, and the longest time by which it woke up too late, second by second."
            parts.append(section("The load generator itself", about, _client(result)))
    return page(f"kvway load: {summary['scenario']} against {summary['url']}", parts)


def _ramp(steps: list[dict[str, float]]) -> str:
    rows = [(f"{step['users']}", f"{step['requests_per_s']:.2f}", f"{step['ttft_p90_s']:.3f}") for step in steps]
    return table(("users", "requests/s", "TTFT p90, s"), rows)


def _curve(values: Floats, name: str, share: str) -> Figure:
    figure, [axes] = new_figure(1, 1, 3.4)
    axes.plot(values, _CURVE)
    axes.set(xscale="log", xlabel=name, ylabel=share, ylim=(0, 1))
    plain_numbers(axes.xaxis)
    return figure


def _ttfts(rows: dict[str, Floats]) -> Figure:
    figure, [axes] = new_figure(1, 1, 3.4)
    edges = np.linspace(0, rows["sent_s"].max() or 1.0, _BINS + 1)
    places = np.clip(np.digitize(rows["sent_s"], edges) - 1, 0, _BINS - 1)
    used = np.unique(places)
    for share in (50, 90, 99):
        values = [np.percentile(rows["ttft_s"][places == place], share) for place in used]
        axes.plot(edges[used], values, label=f"p{share}")
    axes.set(xlabel="s", ylabel="TTFT, s", yscale="log")
    plain_numbers(axes.yaxis)
    axes.legend()
    return figure


def _throughput(rows: dict[str, Floats], result: LoadResult) -> Figure:
    figure, [axes] = new_figure(1, 1, 3.4)
    ended = rows["sent_s"] + rows["latency_s"]
    counts, edges = np.histogram(ended, _BINS, (0, ended.max()))
    axes.plot(edges[:-1], counts / (edges[1] - edges[0]), label="requests/s")
    axes.plot(
        [window.at - result.began for window in result.windows],
        [window.users for window in result.windows],
        color="#888",
        linestyle="--",
        label="users",
    )
    axes.set(xlabel="s", ylim=(0, None))
    axes.legend()
    return figure


def _client(result: LoadResult) -> Figure:
    figure, [cpu, lag] = new_figure(2, 2, 2.6)
    times = [window.at - result.began for window in result.windows]
    cpu.plot(times, [window.cpu for window in result.windows])
    cpu.set(xlabel="s", ylabel="share of a core", ylim=(0, 1.05))
    lag.plot(times, [window.lag_s * 1e3 for window in result.windows])
    lag.set(xlabel="s", ylabel="lag, ms", ylim=(0, None))
    return figure
