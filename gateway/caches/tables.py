"""What the verbs of ``kvway cache`` return, for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_TIERS: Final = ("hbm", "host", "disk", "remote")


def print_lookup(answer: Mapping[str, Any], console: Console) -> None:
    """Print where a prompt is held: a row per worker, then one per instance of LMCache."""
    exact = "" if answer["exact"] else ", in approximate chunks: its token ids are not known here"
    console.print(
        f"{answer['model']}: {answer['prompt_tokens']:,} prompt tokens in chunks of {answer['chunk_tokens']}{exact}",
        highlight=False,
    )
    console.print(_holders("worker", answer["workers"]))
    coordinator = answer["coordinator"]
    if coordinator is None:
        return
    if "problem" in coordinator:
        console.print(f"LMCache: {coordinator['problem']}", highlight=False)
    else:
        console.print(f"LMCache, {coordinator['chunks']} chunks of its own:", highlight=False)
        console.print(_holders("instance", coordinator["instances"]))


def print_stats(answer: Mapping[str, Any], console: Console) -> None:
    """Print what each worker holds, tier by tier, and at which age it is evicted."""
    table = Table()
    table.add_column("worker", overflow="fold")
    table.add_column("tier")
    for column in ("tokens", "of", "age", "in use", "hits", "drift"):
        table.add_column(column, justify="right")
    for worker in answer["workers"]:
        shares = [worker["kv_usage"], worker["hit_rates"].get("engine"), worker["drift"]]
        name, last = worker["worker"], [_share(share) for share in shares]
        for tier, held in worker["tiers"].items():
            age = "" if held["eviction_age_s"] is None else f"{held['eviction_age_s']:,.1f} s"
            table.add_row(name, tier, _number(held["tokens"]), _number(held["capacity_tokens"]), age, *last)
            name, last = "", []
    console.print(table)
    if answer["coordinator"] is not None:
        console.print("LMCache:", highlight=False)
        console.print_json(data=answer["coordinator"])


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print rows that need not have the same columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*("" if row.get(column) is None else str(row[column]) for column in columns))
    console.print(table)


def _holders(head: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(head)
    for column in ("tokens", *_TIERS):
        table.add_column(column, justify="right")
    keys = ["hit_tokens", *(f"{tier}_tokens" for tier in _TIERS)]
    for row in sorted(rows, key=lambda row: -row["hit_tokens"]):
        table.add_row(row[head], *(f"{row[key]:,}" for key in keys))
    return table


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
