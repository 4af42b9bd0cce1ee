"""The command ``kvway``. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway import __version__

app = typer.Typer(
    name="kvway",
    help="KV-cache-aware request router and gateway for fleets of vLLM and SGLang workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", envvar="KVWAY_CONFIG", help="kvway.yaml; without it, defaults and KVWAY_*")
]
AdminOption = Annotated[str, typer.Option("--admin", help="admin address of the running gateway")]
ADMIN_URL = "http://127.0.0.1:8001"


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvway {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """KV-cache-aware request router and gateway."""


@app.command()
def serve(
    config: ConfigOption = None,
    worker: Annotated[list[str] | None, typer.Option(help="worker URL, instead of `workers:`; may be repeated")] = None,
    check: Annotated[bool, typer.Option("--check", help="validate the configuration and exit")] = False,
) -> None:
    """Run the gateway until SIGTERM, then drain."""
    import uvloop

    from gateway.app import Gateway
    from gateway.config import load_config
    from gateway.errors import ConfigError
    from gateway.observe.logs import setup_logs

    try:
        overrides = {"workers": [{"url": url} for url in worker]} if worker else {}
        settings = load_config(config, overrides=overrides)
        if check:
            typer.echo("configuration is valid")
            return
        setup_logs(settings.log)

        async def run() -> None:
            await Gateway(settings).run()

        uvloop.run(run())
    except ConfigError as error:
        _fail(f"kvway: {error}")


@app.command()
def explain(
    request: Annotated[Path, typer.Argument(help="file with a request body as JSON; - for standard input")],
    admin: AdminOption = ADMIN_URL,
    path: Annotated[str, typer.Option(help="request path; found from the body when empty")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the admin API's answer")] = False,
) -> None:
    """Show where a request would go now, and why, term by term."""
    import httpx

    from gateway.admin.render import print_explanation

    try:
        body = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
    except OSError as error:
        _fail(f"kvway: {request}: {error.strerror}")
    try:
        answer = httpx.post(
            f"{admin}/admin/explain", params={"path": path}, content=body, headers={"content-type": "application/json"}
        )
        explanation: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        _fail(f"kvway: no gateway answers at {admin}: {error}. Give its admin address with --admin.")
    if answer.status_code != 200:
        _fail(f"kvway: {explanation['error']['message']}")
    if as_json:
        typer.echo(answer.text)
    else:
        print_explanation(explanation)
