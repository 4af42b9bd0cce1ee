"""The command ``kvway load``: a scenario against any OpenAI-compatible endpoint, headless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from sim.load.headless import LoadResult, Progress
    from sim.load.health import Window
    from sim.load.recorder import Recorder

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def _fail(message: object) -> NoReturn:
    typer.echo(f"kvway load: {message}", err=True)
    raise typer.Exit(2)


def _print_locustfile(wanted: bool) -> None:
    if wanted:
        typer.echo(_LOCUSTFILE)
        raise typer.Exit


def load(
    scenario: Annotated[
        str,
        typer.Argument(
            help="chat, tenants (shared system prompts), rag, agents, bursts, code (coding agents, real "
            "text), each with settings as in chat:sessions=50,think_s=5; or a trace (Mooncake, kvway's recorder, …)"
        ),
    ] = "chat",
    url: Annotated[str, typer.Option(help="endpoint, with or without /v1")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="model; the first that the endpoint lists without")] = "",
    users: Annotated[
        int, typer.Option(min=1, help="at the same time; in an open loop, requests at the same time")
    ] = 32,
    loop: Annotated[
        str,
        typer.Option(
            help="closed: users play conversations one after another; sessions: conversations begin when the "
            "trace says; open: requests are sent when it says. As the scenario is without"
        ),
    ] = "",
    api: Annotated[str, typer.Option(help="chat or completions")] = "chat",
    speed: Annotated[float, typer.Option("--load", help="times as many requests per second")] = 1.0,
    first: Annotated[int, typer.Option(min=0, help="so many requests of the scenario, 0 for all")] = 0,
    duration: Annotated[
        float, typer.Option(min=0, help="seconds in which requests are sent, 0: the whole scenario")
    ] = 0,
    ramp: Annotated[bool, typer.Option("--ramp", help="double the users until the endpoint is saturated")] = False,
    ramp_step: Annotated[float, typer.Option(min=1, help="seconds of a step of the ramp")] = 20,
    ramp_most: Annotated[int, typer.Option(min=1, help="users of its last step, at most")] = 1024,
    seed: Annotated[int, typer.Option(help="of everything drawn by chance")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="answers as long as the scenario says (vLLM, SGLang)")
    ] = False,
    api_key_env: Annotated[str, typer.Option(help="environment variable with the API key")] = "OPENAI_API_KEY",
    report: Annotated[Path | None, typer.Option(help="write one self-contained HTML page with plots")] = None,
    save: Annotated[Path | None, typer.Option(help="write the figures as JSON")] = None,
    rows: Annotated[Path | None, typer.Option("--csv", help="write a row per request as CSV")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    locustfile: Annotated[
        bool,
        typer.Option("--locustfile", callback=_print_locustfile, is_eager=True, help="print the path for locust -f"),
    ] = False,
) -> None:
    """Load-test an OpenAI-compatible endpoint: exit code 0 all answered, 1 requests failed, 2 it could not run."""
    from sim.load.scenario import ramp_loop, read_scenario

    try:
        _check(url, report, save, rows)
        wanted = read_scenario(scenario, seed, ramp_loop(loop) if ramp else loop, api, speed, first)
        # Only now: it replaces the standard library's sockets with gevent's.
        from sim.load.headless import LoadOptions, run_load

        options = LoadOptions(
            url=url,
            scenario=scenario,
            users=users,
            model=model,
            ignore_eos=ignore_eos,
            api_key_env=api_key_env,
            duration_s=duration,
            ramp=ramp,
            ramp_step=ramp_step,
            ramp_most=ramp_most,
        )
        with _progress() as progress:
            result = run_load(options, wanted, progress)
        _write(result, report, save, rows)
    except ValueError as error:
        _fail(error)
    _print(result, as_json)
    raise typer.Exit(int(bool(result.summary["failed"] or not result.summary["answered"])))


def _check(url: str, report: Path | None, *others: Path | None) -> None:
    from sim.load.endpoint import base_url
    from sim.output import check_writable
    from sim.page import check_plotting

    if find_spec("locust") is None:
        raise ValueError("load tests need locust: pip install 'kvway[load]'")
    base_url(url)
    for path in (report, *others):
        if path is not None:
            check_writable(path)
    if report is not None:
        check_plotting()


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a line on standard error: time, requests, and what the client has to say about itself."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    from sim.load.health import describe

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def show(seconds: float, recorder: Recorder, windows: list[Window]) -> None:
            words = [f"{recorder.answered} answered", f"{recorder.answered / max(seconds, 1e-9):.1f}/s"]
            if failed := sum(recorder.errors.values()):
                words.append(f"{failed} failed")
            if windows:
                words.append(f"{windows[-1].users} users")
                if windows[-1].saturated:
                    words.append(f"load generator saturated: {describe(windows[-1])}")
            bar.update(task, description=", ".join(words), refresh=True)

        yield show


def _write(result: LoadResult, report: Path | None, save: Path | None, rows: Path | None) -> None:
    from sim.load.report import as_csv, render
    from sim.output import write_whole

    if save is not None:
        write_whole(save, json.dumps(result.summary, indent=1).encode())
    if rows is not None:
        write_whole(rows, as_csv(result).encode())
    if report is not None:
        write_whole(report, render(result).encode())


def _print(result: LoadResult, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from sim.load.report import figures, remarks

    if as_json:
        typer.echo(json.dumps(result.summary))
        return
    console = Console(markup=False)
    console.print(f"{result.summary['scenario']} against {result.summary['url']}", highlight=False)
    table = Table("")
    table.add_column(result.summary["model"], justify="right")
    for name, value in figures(result.summary):
        table.add_row(name, value)
    console.print(table)
    for step in result.summary.get("ramp", ()):
        console.print(
            f"{step['users']:>5} users: {step['requests_per_s']:.2f} requests/s, TTFT p90 {step['ttft_p90_s']:.3f} s",
            highlight=False,
        )
    for remark in remarks(result.summary):
        console.print(remark, style="bold", highlight=False)
