"""``kvway cache``: the caches of a running fleet, looked at and steered through the gateway's admin port.

Exit codes: 0 done, 1 done in part or not at all, 2 wrong usage or no gateway, 3 no backend here can do it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import typer

ADMIN_URL: Final = "http://127.0.0.1:8001"
_PATIENCE_S: Final = 900.0  # a prefetch waits for its worker's turn, and for the prefill

cache_app = typer.Typer(help="Look up, pin, prefetch, move and clear what workers have cached.", no_args_is_help=True)

RequestArgument = Annotated[
    Path | None,
    typer.Argument(help="file with a request body or messages as JSON, or with plain text; - for standard input"),
]
TextOption = Annotated[str | None, typer.Option(help="the prompt itself, instead of a file")]
ModelOption = Annotated[str, typer.Option(help="model, where the request names none")]
PathOption = Annotated[str, typer.Option(help="request path; found from the body when empty")]
AdminOption = Annotated[
    str,
    typer.Option("--admin", callback=lambda url: url.rstrip("/"), help="admin address of the running gateway"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print the admin API's answer")]


@cache_app.command()
def lookup(
    request: RequestArgument = None,
    text: TextOption = None,
    model: ModelOption = "",
    path: PathOption = "",
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Show which worker holds how many tokens of a prompt, in which tier."""
    from rich.console import Console

    from gateway.caches.tables import print_lookup

    answer = _ask(admin, "POST", "lookup", {"path": path}, read_prompt(request, text, model))
    _print_json(answer) if as_json else print_lookup(answer, Console(markup=False))


@cache_app.command()
def pin(
    request: RequestArgument = None,
    text: TextOption = None,
    model: ModelOption = "",
    path: PathOption = "",
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Keep a prompt's chunks from being evicted from LMCache's lower tiers."""
    _show(_ask(admin, "POST", "pin", {"path": path}, read_prompt(request, text, model)), as_json)


@cache_app.command()
def unpin(
    request: RequestArgument = None,
    text: TextOption = None,
    model: ModelOption = "",
    path: PathOption = "",
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Take back one pin."""
    _show(_ask(admin, "POST", "unpin", {"path": path}, read_prompt(request, text, model)), as_json)


@cache_app.command()
def prefetch(
    worker: Annotated[str, typer.Option(help="which is to hold the prompt")],
    request: RequestArgument = None,
    text: TextOption = None,
    model: ModelOption = "",
    by: Annotated[
        Literal["auto", "coordinator", "warm-up"],
        typer.Option(help="let LMCache load it, or let the worker compute it; auto: the first where that has it"),
    ] = "auto",
    path: PathOption = "",
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Bring a prompt to a worker."""
    parameters = {"path": path, "worker": worker, "by": by}
    answer = _ask(admin, "POST", "prefetch", parameters, read_prompt(request, text, model))
    _show(answer, as_json)
    raise typer.Exit(int(not has_come_whole(answer)))


@cache_app.command()
def move(
    source: Annotated[str, typer.Option("--from", help="worker whose LMCache server holds the prompt")],
    target: Annotated[str, typer.Option("--to", help="worker that is to hold it")],
    request: RequestArgument = None,
    text: TextOption = None,
    model: ModelOption = "",
    path: PathOption = "",
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Bring a prompt from one worker's LMCache server to another's."""
    parameters = {"path": path, "source": source, "target": target}
    answer = _ask(admin, "POST", "move", parameters, read_prompt(request, text, model))
    _show(answer, as_json)
    raise typer.Exit(int(answer["status"] != "moved"))


@cache_app.command()
def clear(
    request: RequestArgument = None,
    worker: Annotated[list[str] | None, typer.Option(help="whose cache; may be repeated")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="those of all workers")] = False,
    text: TextOption = None,
    model: ModelOption = "",
    path: PathOption = "",
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Empty the caches of workers; with a prompt, delete only this one, from their LMCache servers."""
    if bool(worker) == everyone:
        _fail("name workers with --worker, or say --all")
    body = b"" if request is None and text is None else read_prompt(request, text, model)
    answer = _ask(admin, "POST", "clear", {"path": path, "worker": worker or []}, body)
    rows = answer["workers"]
    if as_json:
        _print_json(answer)
    else:
        from rich.console import Console

        from gateway.caches.tables import print_rows

        print_rows(rows, Console(markup=False))
    raise typer.Exit(int(not all(map(is_cleared, rows))))


@cache_app.command()
def stats(admin: AdminOption = ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show what each worker holds in which tier, how old it becomes there, and how often it is hit."""
    from rich.console import Console

    from gateway.caches.tables import print_stats

    answer = _ask(admin, "GET", "stats", {}, b"")
    _print_json(answer) if as_json else print_stats(answer, Console(markup=False))


@cache_app.command()
def quota(
    salt: Annotated[str, typer.Argument(help="cache_salt of the prompts; empty: those without one")] = "",
    limit_gb: Annotated[float | None, typer.Option(min=0, help="GiB in LMCache's lower tiers")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="take the bound away")] = False,
    admin: AdminOption = ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Bound what the prompts of one cache_salt may hold in LMCache."""
    if (limit_gb is None) != remove:
        _fail("give --limit-gb, or --remove")
    method, bound = ("DELETE", {}) if remove else ("PUT", {"limit_gb": limit_gb})
    _show(_ask(admin, method, "quota", {"salt": salt, **bound}, b""), as_json)


def has_come_whole(answer: dict[str, Any]) -> bool:
    """Return whether a prefetch brought all of its prompt; one that LMCache has not completed in time did not."""
    found = answer.get("found_keys", 0)
    return found is not None and found == answer.get("total_keys", 0)


def is_cleared(row: dict[str, Any]) -> bool:
    """Return whether nothing of a worker, or nothing of a prompt there, was left behind for want of a backend."""
    return "problem" not in row and {row.get("engine"), row.get("lmcache")} <= {"cleared", None}


def read_prompt(request: Path | None, text: str | None, model: str) -> bytes:
    """Return the request body that would bring a prompt: what was given, or made of messages or text."""
    if (request is None) == (text is None):
        _fail("give a file with a request, or a prompt with --text")
    body: Any = {"prompt": text}
    if request is not None:
        body = _parse(_read(request))
    if model:
        body.setdefault("model", model)
    return json.dumps(body).encode()


def _read(request: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()).decode()
    except OSError as error:
        _fail(f"{request}: {error.strerror}")
    except UnicodeDecodeError:
        _fail(f"{request} is neither JSON nor text in UTF-8")


def _parse(text: str) -> dict[str, Any]:
    """Return a request body: the text's own, or one made of a list of messages, or of plain text."""
    try:
        content = json.loads(text)
    except ValueError:
        content = text
    if isinstance(content, dict):
        return content
    return {"messages": content} if isinstance(content, list) else {"prompt": text}


def _ask(admin: str, method: str, verb: str, parameters: dict[str, Any], body: bytes) -> dict[str, Any]:
    import httpx

    headers = {"content-type": "application/json"}
    url = f"{admin}/admin/cache/{verb}"
    try:
        with httpx.Client(timeout=httpx.Timeout(_PATIENCE_S, connect=5.0)) as client:
            answer = client.request(method, url, params=parameters, content=body, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        _fail(f"no gateway answers at {admin} ({error}). Give its admin address with --admin.")
    try:
        content: dict[str, Any] = answer.json()
        problem = None if answer.status_code == 200 else content["error"]["message"]
    except (ValueError, KeyError, TypeError):
        _fail(f"what answers at {admin} is no admin port of kvway. Give its admin address with --admin.")
    if problem is not None:
        _fail(problem, {400: 2, 404: 2, 501: 3}.get(answer.status_code, 1))
    return content


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(answer)
        return
    for name, value in answer.items():
        typer.echo(f"{name.replace('_', ' ')}: {'not known' if value is None else value}")


def _print_json(answer: dict[str, Any]) -> None:
    typer.echo(json.dumps(answer))


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"kvway cache: {message}", err=True)
    raise typer.Exit(code)
