"""The command ``kvway sim``: a fleet on a laptop, under the policies of the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from sim.experiment import Case, Cell, Outcome
    from sim.scenario import PolicyChoice

sim_app = typer.Typer(help="Simulate a fleet: which policy, how many workers, how much cache?", no_args_is_help=True)

TrafficArgument = Annotated[
    str,
    typer.Argument(help="trace file (Mooncake, Claude Code, Azure, kvway's recorder), or chat, agents, tenants, rag, "
    "bursts, each with settings as in agents:sessions=64,think_s=5"),
]  # fmt: skip
FleetOption = Annotated[Path | None, typer.Option("--fleet", help="YAML file with the fleet; flags win over it")]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="workers")]
ProfileOption = Annotated[str | None, typer.Option(help="speed of a worker: model/gpu/tensor-parallel")]
CapacityOption = Annotated[int | None, typer.Option(min=1, help="tokens of KV cache in a worker's HBM")]
HostOption = Annotated[int | None, typer.Option(min=1, help="tokens of KV cache in a worker's host memory")]
LoadOption = Annotated[float, typer.Option(help="times as many requests per second")]
WorkingSetOption = Annotated[float, typer.Option(help="times as large a working set, at the same rate")]
ShareOption = Annotated[float, typer.Option(help="part of the conversations, 0 to 1")]
FirstOption = Annotated[int, typer.Option(min=0, help="so many requests, 0 for all")]
LoopOption = Annotated[
    bool | None,
    typer.Option("--closed-loop/--open-loop", help="whether a turn waits for the answer before; as the trace says"),
]
SpreadOption = Annotated[float, typer.Option(min=0, help="recorded sessions begin within so many seconds")]
UsersOption = Annotated[
    int, typer.Option(min=0, help="so many users play the sessions, one after another; measured while all of them do")
]
PriceOption = Annotated[float, typer.Option(min=0, help="price of a GPU hour, in any currency")]
ReportOption = Annotated[Path | None, typer.Option(help="write one self-contained HTML page with plots")]
SaveOption = Annotated[Path | None, typer.Option(help="write the figures as JSON")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def _fail(message: object) -> NoReturn:
    typer.echo(f"kvway sim: {message}", err=True)
    raise typer.Exit(2)


@sim_app.command()
def run(
    traffic: TrafficArgument,
    policy: Annotated[str, typer.Option(help="policy, with parameters as in name:key=value")] = "expected-cost",
    fleet: FleetOption = None,
    workers: WorkersOption = None,
    profile: ProfileOption = None,
    capacity: CapacityOption = None,
    host_tokens: HostOption = None,
    load: LoadOption = 1.0,
    ws: WorkingSetOption = 1.0,
    share: ShareOption = 1.0,
    first: FirstOption = 0,
    closed_loop: LoopOption = None,
    spread: SpreadOption = 3600.0,
    users: UsersOption = 0,
    seed: Annotated[int, typer.Option(help="of traffic and policy")] = 0,
    gpu_hour: PriceOption = 2.5,
    report: ReportOption = None,
    save: SaveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run traffic through a fleet under one policy."""
    from sim.experiment import Case, run_case
    from sim.scenario import Traffic, read_fleet, read_policy

    try:
        _check_outputs(report, save)
        settings = read_fleet(
            fleet, workers=workers, profile=profile, capacity_tokens=capacity, host_tokens=host_tokens
        )
        wanted = Traffic(traffic, load, ws, share, first, closed_loop, spread, users)
        case = Case(read_policy(policy), wanted, settings, {}, seed, gpu_hour)
        with _progress("reading") as advance:
            outcome = run_case(case, on_progress=lambda done, total: advance(case.policy.label, done, total))
        found = {"traffic": traffic, **outcome.summary}
        _write(report, save, [outcome], found, traffic)
    except ValueError as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print_run(found)


@sim_app.command()
def compare(
    traffic: TrafficArgument,
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = "expected-cost,round-robin",
    sweep: Annotated[
        list[str] | None, typer.Option(help="load=…, ws_cap=… or workers=…, values separated by commas; repeatable")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each, with seeds from 0")] = 1,
    processes: Annotated[int, typer.Option(min=0, help="at the same time, 0: one per core")] = 0,
    fleet: FleetOption = None,
    workers: WorkersOption = None,
    profile: ProfileOption = None,
    capacity: CapacityOption = None,
    host_tokens: HostOption = None,
    load: LoadOption = 1.0,
    ws: WorkingSetOption = 1.0,
    share: ShareOption = 1.0,
    first: FirstOption = 0,
    closed_loop: LoopOption = None,
    spread: SpreadOption = 3600.0,
    users: UsersOption = 0,
    gpu_hour: PriceOption = 2.5,
    report: ReportOption = None,
    save: SaveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the same traffic under several policies, over seeds and sweeps."""
    from sim import experiment
    from sim.scenario import Traffic, read_fleet

    try:
        _check_outputs(report, save)
        settings = read_fleet(
            fleet, workers=workers, profile=profile, capacity_tokens=capacity, host_tokens=host_tokens
        )
        chosen = _read_policies(policies)
        wanted = Traffic(traffic, load, ws, share, first, closed_loop, spread, users)
        swept = experiment.cells([experiment.parse_sweep(words) for words in sweep or ()])
        cases = [
            experiment.Case(each, wanted, settings, cell, seed, gpu_hour)
            for seed in range(seeds)
            for cell in swept
            for each in chosen
        ]
        outcomes = _run_all(cases, processes)
        rows = experiment.compare(outcomes)
        found = {"traffic": traffic, "seeds": seeds, "rows": rows}
        _write(report, save, outcomes, found, traffic)
    except ValueError as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print_comparison(rows, swept[0], traffic)


def _read_policies(words: str) -> list[PolicyChoice]:
    from sim.scenario import read_policy

    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise ValueError("--policies names none; write for instance --policies expected-cost,round-robin")
    return [read_policy(name) for name in dict.fromkeys(names)]


def _run_all(cases: Sequence[Case], processes: int) -> list[Outcome]:
    from sim.experiment import run_cases

    done = 0
    with _progress("simulating") as advance:

        def on_done(_: Outcome) -> None:
            nonlocal done
            done += 1
            advance("simulating", done, len(cases))

        advance("simulating", 0, len(cases))
        return run_cases(cases, on_done, processes)


def _console(err: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=err, markup=False)


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """Show a bar on standard error; yields what moves it: title, done, total."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(err=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def _check_outputs(report: Path | None, save: Path | None) -> None:
    from sim.output import check_writable

    for path in (report, save):
        if path is not None:
            check_writable(path)
    if report is not None:
        from sim.page import check_plotting

        check_plotting()


def _write(
    report: Path | None, save: Path | None, outcomes: Sequence[Outcome], found: dict[str, Any], title: str
) -> None:
    from sim.output import write_whole

    if save is not None:
        write_whole(save, json.dumps(found, indent=1).encode())
    if report is not None:
        from sim.report import render

        write_whole(report, render(title, outcomes).encode())


_SHOWN = (
    ("requests", "answered", "{:,.0f}"),
    ("duration, s", "duration_s", "{:,.0f}"),
    ("requests/s", "requests_per_s", "{:.2f}"),
    ("hit rate", "hit_rate", "{:.1%}"),
    ("  from HBM", "hit_rate_hbm", "{:.1%}"),
    ("  from host memory", "hit_rate_host", "{:.1%}"),
    ("  from disk", "hit_rate_disk", "{:.1%}"),
    ("  from the remote pool", "hit_rate_remote", "{:.1%}"),
    ("TTFT mean, s", "ttft_mean_s", "{:.3f}"),
    ("TTFT p50, s", "ttft_p50_s", "{:.3f}"),
    ("TTFT p90, s", "ttft_p90_s", "{:.3f}"),
    ("TTFT p99, s", "ttft_p99_s", "{:.3f}"),
    ("ITL mean, s", "itl_mean_s", "{:.4f}"),
    ("wait mean, s", "wait_mean_s", "{:.3f}"),
    ("cost per 1,000 requests", "cost_per_1k_requests", "{:.2f}"),
)


def _print_run(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("", title=f"{found['traffic']}, {found['workers']} workers", title_justify="left")
    table.add_column(str(found["policy"]), justify="right")
    for title, key, form in _SHOWN:
        if found[key] or not title.startswith(" "):
            table.add_row(title, form.format(found[key]))
    _console().print(table)


def _print_comparison(rows: Sequence[dict[str, Any]], cell: Cell, title: str) -> None:
    from rich.table import Table

    columns = (
        ("req/s", "requests_per_s", 1, "{:.2f}"),
        ("hits", "hit_rate", 1, "{:.1%}"),
        ("TTFT", "ttft_mean_s", 1, "{:.2f}"),
        ("p90", "ttft_p90_s", 1, "{:.2f}"),
        ("p99", "ttft_p99_s", 1, "{:.2f}"),
        ("ITL", "itl_mean_s", 1e3, "{:.1f}"),
        ("cost", "cost_per_1k_requests", 1, "{:.2f}"),
    )
    table = Table(*cell, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.caption, table.caption_justify = "TTFT mean, p90, p99 in s; ITL in ms; cost of 1,000 requests", "left"
    table.add_column("policy", overflow="fold")
    for name, *_ in columns:
        table.add_column(name, justify="right")
    for row in rows:
        keys = [f"{row[key]:g}" for key in cell]
        figures = [form.format(row[key] * factor) for _, key, factor, form in columns]
        table.add_row(*keys, row["policy"], *figures)
    _console().print(table)
