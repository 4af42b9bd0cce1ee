"""One HTML page of what was simulated: tables, and plots as inline SVG. Nothing is fetched when it is opened."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from policies.base import Tier
from sim.experiment import Outcome, compare
from sim.results import SimResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MAX_POLICIES: Final = 8  # as many as colours can be told apart
_CURVE_POINTS: Final = 400
_TIER_COLOURS: Final = {Tier.HBM: "#2f6db3", Tier.HOST: "#58a65c", Tier.DISK: "#e0a030", Tier.REMOTE: "#b05fb0"}
_STYLE: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvway",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin-top: 2.2rem }} p {{ color: #555 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4 }}
th:first-child, td:first-child {{ text-align: left; white-space: nowrap }} .wide {{ overflow-x: auto }}
svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def check_plotting() -> None:
    """Refuse before the work is done what could not be drawn after it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'kvway[report]', or leave out --report")


def render(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return the page.

    Args:
        title: what was simulated.
        outcomes: of all cases; those with results are drawn, of a sweep the last cell.

    Returns:
        HTML that refers to nothing outside itself.
    """
    import matplotlib as mpl

    rows = compare(outcomes)
    kept = [outcome for outcome in outcomes if outcome.result is not None]
    last = kept[-1].case.cell
    shown = [outcome.result for outcome in kept if outcome.case.cell == last and outcome.result is not None]
    shown = shown[:_MAX_POLICIES]
    where = ", ".join(f"{key} {value:g}" for key, value in last.items())
    at = f" At {where}." if where else ""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # its stubs name every key
        parts = [
            _table(rows, list(last)),
            _section("Time to first token", f"Share of requests that had their first token by then.{at}", _cdf(shown)),
            _section("Hit rate by tier", f"Share of the prompt tokens that arrived and came from each tier.{at}",
                     _hits(shown)),
            _section("Load per worker", f"Requests in the batch and waiting at each worker.{at}", _loads(shown)),
            _section("Cost against time to first token", "Each point is a policy and a fleet; the line joins those "
                     "that nothing betters in both.", _pareto(rows)),
        ]  # fmt: skip
        for key in last:
            if len({row[key] for row in rows}) > 1:
                others = {name: each for name, each in last.items() if name != key}
                also = "".join(f", {name} {each:g}" for name, each in others.items())
                figure = _sweep([row for row in rows if all(row[n] == v for n, v in others.items())], key)
                parts.append(_section(f"Time to first token over {key}", f"Mean, over {key}{also}.", figure))
    return _PAGE.format(title=escape(f"kvway sim: {title}"), body="\n".join(parts))


def _section(title: str, about: str, figure: Figure) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = drawn.getvalue()
    return f"<h2>{escape(title)}</h2>\n<p>{escape(about)}</p>\n{svg[svg.index('<svg') :]}"


def _figure(panels: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    lines = -(-panels // columns)
    figure = Figure(figsize=(9.5, height * lines), layout="constrained")
    axes = [figure.add_subplot(lines, columns, number + 1) for number in range(panels)]
    return figure, axes


def _plain(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis out, not as powers of ten."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def _cdf(results: Sequence[SimResult]) -> Figure:
    figure, [axes] = _figure(1, 1, 3.8)
    for result in results:
        known = np.sort(result.ttft_s[np.isfinite(result.ttft_s)])
        if len(known):
            shares = np.linspace(0, 1, min(_CURVE_POINTS, len(known)))
            axes.plot(np.quantile(known, shares), shares, label=result.policy)
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", ylim=(0, 1))
    _plain(axes.xaxis)
    axes.legend(loc="lower right")
    return figure


def _hits(results: Sequence[SimResult]) -> Figure:
    figure, panels = _figure(len(results), min(2, len(results)), 2.6)
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

    figure, panels = _figure(len(results), min(2, len(results)), 2.6)
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
    figure, [axes] = _figure(1, 1, 3.8)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        costs = [row["cost_per_1k_requests"] for row in own]
        axes.scatter(costs, [row["ttft_p90_s"] for row in own], label=policy)
    best = frontier([(row["cost_per_1k_requests"], row["ttft_p90_s"]) for row in rows])
    axes.plot([cost for cost, _ in best], [ttft for _, ttft in best], color="#888", linewidth=1, zorder=0)
    axes.set(xlabel="cost per 1,000 requests", ylabel="TTFT p90, s", yscale="log")
    _plain(axes.yaxis)
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
    figure, [axes] = _figure(1, 1, 3.8)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: float(row[key]))
        errors = [row["errors"].get("ttft_mean_s", 0.0) for row in own]
        values = [row["ttft_mean_s"] for row in own]
        axes.errorbar([row[key] for row in own], values, yerr=errors, marker="o", capsize=3, label=policy)
    axes.set(xlabel=key, ylabel="TTFT mean, s", yscale="log")
    _plain(axes.yaxis)
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
    head = "".join(f"<th>{escape(name)}</th>" for name in ("policy", *swept, *(name for name, _, _ in columns)))
    lines = []
    for row in rows:
        cells = [escape(str(row["policy"])), *(f"{row[key]:g}" for key in swept)]
        cells += [form.format(row[key] * (1e3 if "ms" in name else 1)) for name, key, form in columns]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"
