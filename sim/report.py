"""One HTML page of what was simulated: tables, and plots as inline SVG. Nothing is fetched when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from policies.base import Tier
from sim.experiment import Outcome, compare
from sim.page import new_figure, page, plain_numbers, plotting, section, table
from sim.results import SimResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_POLICIES: Final = 8  # as many as colours can be told apart
_CURVE_POINTS: Final = 400
_TIER_COLOURS: Final = {Tier.HBM: "#2f6db3", Tier.HOST: "#58a65c", Tier.DISK: "#e0a030", Tier.REMOTE: "#b05fb0"}


def render(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page.

    Args:
        title: what was simulated.
        outcomes: of all cases; those with results are drawn, of a sweep the last cell.

    Returns:
        HTML that refers to nothing outside itself.
    """
    rows = compare(outcomes)
    kept = [outcome for outcome in outcomes if outcome.result is not None]
    last = kept[-1].case.cell
    shown = [outcome.result for outcome in kept if outcome.case.cell == last and outcome.result is not None]
    shown = shown[:_MAX_POLICIES]
    where = ", ".join(f"{key} {value:g}" for key, value in last.items())
    at = f" At {where}." if where else ""
    with plotting():
        parts = [
            _table(rows, list(last)),
            section("Time to first token", f"Share of requests that had their first token by then.{at}", _cdf(shown)),
            section("Hit rate by tier", f"Share of the prompt tokens that arrived and came from each tier.{at}",
                     _hits(shown)),
            section("Load per worker", f"Requests in the batch and waiting at each worker.{at}", _loads(shown)),
            section("Cost against time to first token", "Each point is a policy and a fleet; the line joins those "
                     "that nothing betters in both.", _pareto(rows)),
        ]  # fmt: skip
        for key in last:
            if len({row[key] for row in rows}) > 1:
                others = {name: each for name, each in last.items() if name != key}
                also = "".join(f", {name} {each:g}" for name, each in others.items())
                figure = _sweep([row for row in rows if all(row[n] == v for n, v in others.items())], key)
                parts.append(section(f"Time to first token over {key}", f"Mean, over {key}{also}.", figure))
    return page(f"kvway sim: {title}", parts)


def _cdf(results: Sequence[SimResult]) -> Figure:
    figure, [axes] = new_figure(1, 1, 3.8)
    for result in results:
        known = np.sort(result.ttft_s[np.isfinite(result.ttft_s)])
        if len(known):
            shares = np.linspace(0, 1, min(_CURVE_POINTS, len(known)))
            axes.plot(np.quantile(known, shares), shares, label=result.policy)
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", ylim=(0, 1))
    plain_numbers(axes.xaxis)
    axes.legend(loc="lower right")
    return figure


def _hits(results: Sequence[SimResult]) -> Figure:
    figure, panels = new_figure(len(results), min(2, len(results)), 2.6)
    for axes, result in zip(panels, results, strict=True):
        times, rates = result.hit_rates_over_time()
        arrived = ~np.isnan(rates[:, 0])
        times, rates = times[arrived], rates[arrived]
        used = [tier for tier in Tier if rates[:, tier].any()] or [Tier.HBM]
        colours = [_TIER_COLOURS[tier] for tier in used]
        axes.stackplot(times, rates[:, used].T, colors=colours, labels=[tier.name for tier in used])
        axes.set(title=f"{result.policy}: {result.hit_rate():.1%}", ylim=(0, 1), xlabel="s", ylabel="hit rate")
        axes.legend(loc="upper left", ncols=len(used))
    return figure


def _loads(results: Sequence[SimResult]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, panels = new_figure(len(results), min(2, len(results)), 2.6)
    loads = [(result.running + result.waiting).T for result in results]
    most = max((load.max(initial=1) for load in loads), default=1)
    mesh: Any = None
    for axes, result, load in zip(panels, results, loads, strict=True):
        times = np.append(result.sample_s, result.sample_s[-1] + 1) if len(result.sample_s) else np.array([0.0, 1.0])
        shown = load if load.size else np.zeros((load.shape[0], 1))
        edges = np.arange(load.shape[0] + 1) - 0.5
        mesh = axes.pcolormesh(times, edges, shown, vmin=0, vmax=most, cmap="viridis", rasterized=True)
        axes.set(title=result.policy, xlabel="s", ylabel="worker")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
    if mesh is not None:
        figure.colorbar(mesh, ax=panels, label="requests")
    return figure


def _pareto(rows: Sequence[dict[str, Any]]) -> Figure:
    figure, [axes] = new_figure(1, 1, 3.8)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        costs = [row["cost_per_1k_requests"] for row in own]
        axes.scatter(costs, [row["ttft_p90_s"] for row in own], label=policy)
    best = frontier([(row["cost_per_1k_requests"], row["ttft_p90_s"]) for row in rows])
    axes.plot([cost for cost, _ in best], [ttft for _, ttft in best], color="#888", linewidth=1, zorder=0)
    axes.set(xlabel="cost per 1,000 requests", ylabel="TTFT p90, s", yscale="log")
    plain_numbers(axes.yaxis)
    axes.legend()
    return figure


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other betters in one coordinate without being worse in the other, by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _sweep(rows: Sequence[dict[str, Any]], key: str) -> Figure:
    figure, [axes] = new_figure(1, 1, 3.8)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: float(row[key]))
        errors = [row["errors"].get("ttft_mean_s", 0.0) for row in own]
        values = [row["ttft_mean_s"] for row in own]
        axes.errorbar([row[key] for row in own], values, yerr=errors, marker="o", capsize=3, label=policy)
    axes.set(xlabel=key, ylabel="TTFT mean, s", yscale="log")
    plain_numbers(axes.yaxis)
    axes.legend()
    return figure


def _table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    columns = (
        ("workers", "workers", "{:,.0f}"),
        ("requests/s", "requests_per_s", "{:.2f}"),
        ("hit rate", "hit_rate", "{:.1%}"),
        ("TTFT mean, s", "ttft_mean_s", "{:.3f}"),
        ("p50", "ttft_p50_s", "{:.3f}"),
        ("p90", "ttft_p90_s", "{:.3f}"),
        ("p99", "ttft_p99_s", "{:.3f}"),
        ("ITL mean, ms", "itl_mean_s", "{:.2f}"),
        ("cost per 1,000", "cost_per_1k_requests", "{:.2f}"),
    )
    swept = [key for key in keys if key != "workers"]
    head = ["policy", *swept, *(name for name, _, _ in columns)]
    lines = []
    for row in rows:
        cells = [str(row["policy"]), *(f"{row[key]:g}" for key in swept)]
        cells += [form.format(row[key] * (1e3 if "ms" in name else 1)) for name, key, form in columns]
        lines.append(cells)
    return table(head, lines)
