"""HTML pages with tables, and plots as inline SVG; nothing is fetched when they are opened."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

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


@contextmanager
def plotting() -> Iterator[None]:
    """Draw in the pages' style while the block runs."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # its stubs name every key
        yield


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page; the title is text, the parts are HTML."""
    return _PAGE.format(title=escape(title), body="\n".join(parts))


def section(title: str, about: str, figure: Figure) -> str:
    """Return a heading, a line about the plot, and the plot."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = drawn.getvalue()
    return f"<h2>{escape(title)}</h2>\n<p>{escape(about)}</p>\n{svg[svg.index('<svg') :]}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are text."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return '<div class="wide"><table>' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def new_figure(panels: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, ``columns`` beside each other, each ``height`` inches high."""
    from matplotlib.figure import Figure

    lines = -(-panels // columns)
    figure = Figure(figsize=(9.5, height * lines), layout="constrained")
    axes = [figure.add_subplot(lines, columns, number + 1) for number in range(panels)]
    return figure, axes


def plain_numbers(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis out, not as powers of ten."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
