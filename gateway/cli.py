"""The command ``kvway``. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from gateway import __version__
from gateway.cache_commands import ADMIN_URL, AdminOption, cache_app
from sim.commands import sim_app
from sim.load.commands import load
from sim.plan_commands import plan_app

app = typer.Typer(
    name="kvway",
    help="KV-cache-aware request router and gateway for fleets of vLLM and SGLang workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(sim_app, name="sim")
app.add_typer(plan_app, name="plan")
app.add_typer(cache_app, name="cache")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="KVWAY_CONFIG", help="kvway.yaml; without it, defaults and KVWAY_*"),
]


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvway {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """KV-cache-aware request router and gateway."""


@app.command()
def serve(
    config: ConfigOption = None,
    worker: Annotated[list[str] | None, typer.Option(help="worker URL, instead of `workers:`; may be repeated")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="processes that share the public port; process k has admin port + k")
    ] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="validate the configuration, tokenizers included, and exit")
    ] = False,
) -> None:
    """Run the gateway until SIGTERM, then drain."""
    import uvloop

    from gateway.config import Config, load_config
    from gateway.errors import ConfigError
    from gateway.observe.logs import setup_logs

    def read() -> Config:
        return load_config(config, worker_urls=worker or ())

    try:
        settings = read()
        if check:
            from gateway.prompt.model import find_problems

            if problems := find_problems(settings.models.values()):
                raise ConfigError("\n".join(problems))
            typer.echo("configuration is valid")
            return
        setup_logs(settings.log)

        async def run() -> int:
            from gateway.reload import Hangups

            configs = Hangups().configs(read)
            if processes > 1:
                from gateway.processes.supervisor import supervise

                return await supervise(settings, processes, configs)
            from gateway.app import Gateway

            await Gateway(settings).run(configs)
            return 0

        code = uvloop.run(run())
    except ConfigError as error:
        _fail(f"kvway: {error}")
    raise typer.Exit(code)


@app.command()
def check(
    config: ConfigOption = None,
    prompts: Annotated[bool, typer.Option(help="send every worker one prompt twice, to see events and overlap")] = True,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds to wait for one answer")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Hold the running workers to the configuration: exit code 0 all is well, 1 problems, 2 bad configuration."""
    import json

    import uvloop
    from rich.console import Console

    from gateway.check.findings import as_data, has_problems, print_findings
    from gateway.check.fleet import CheckOptions, check_fleet
    from gateway.config import load_config
    from gateway.errors import ConfigError

    try:
        settings = load_config(config)
        findings = uvloop.run(check_fleet(settings, CheckOptions(send_prompts=prompts, timeout_s=timeout)))
    except ConfigError as error:
        _fail(f"kvway: {error}")
    if as_json:
        typer.echo(json.dumps(as_data(findings)))
    else:
        print_findings(findings, Console())
    raise typer.Exit(int(has_problems(findings)))


@app.command()
def explain(
    request: Annotated[Path, typer.Argument(help="file with a request body as JSON; - for standard input")],
    admin: AdminOption = ADMIN_URL,
    path: Annotated[str, typer.Option(help="request path; found from the body when empty")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the admin API's answer")] = False,
) -> None:
    """Show where a request would go now, and why, term by term."""
    import httpx
    from rich.console import Console

    from gateway.admin.explain import print_explanation

    try:
        body = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
    except OSError as error:
        _fail(f"kvway: {request}: {error.strerror}")
    try:
        answer = httpx.post(
            f"{admin}/admin/explain", params={"path": path}, content=body, headers={"content-type": "application/json"}
        )
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        _fail(f"kvway: no gateway answers at {admin} ({error}). Give its admin address with --admin.")
    try:
        explanation: dict[str, Any] = answer.json()
        problem = None if answer.status_code == 200 else explanation["error"]["message"]
    except (ValueError, KeyError, TypeError):
        _fail(f"kvway: what answers at {admin} is no admin port of kvway. Give its admin address with --admin.")
    if problem is not None:
        _fail(f"kvway: {problem}")
    if as_json:
        typer.echo(answer.text)
    else:
        print_explanation(explanation, Console(markup=False))


@app.command()
def worker(
    model: Annotated[str, typer.Option(help="model name it serves")] = "sim",
    tokenizer: Annotated[
        Path | None, typer.Option(help="folder with tokenizer.json and chat template; without it, 4 bytes make a token")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port, 0 for any")] = 8100,
    api_key: Annotated[str, typer.Option(help="key that requests must bring, as with vllm serve --api-key")] = "",
    profile: Annotated[str, typer.Option(help="how fast it is: model/gpu/tensor-parallel")] = "llama-3.1-70b/h100/4",
    speed: Annotated[float, typer.Option(help="how many times faster than that its clock runs")] = 1.0,
    block_size: Annotated[int, typer.Option(help="tokens per KV block")] = 16,
    capacity_tokens: Annotated[int, typer.Option(help="tokens of KV cache in HBM")] = 461_376,
    host_tokens: Annotated[int, typer.Option(help="tokens of KV cache in host memory, 0 for no host tier")] = 0,
    max_model_len: Annotated[int, typer.Option(help="longest prompt and output together, 0 for what fits")] = 0,
    max_requests: Annotated[int, typer.Option(help="requests at a time before it answers 503, 0 for no limit")] = 0,
    output_tokens: Annotated[int, typer.Option(help="length of an answer without max_tokens")] = 128,
    stream_interval: Annotated[int, typer.Option(help="tokens per chunk of a stream")] = 1,
    adapter: Annotated[list[str] | None, typer.Option(help="LoRA adapter it serves too; may be repeated")] = None,
    kv_events: Annotated[str | None, typer.Option(help="ZMQ endpoint of its KV events, tcp://host:port")] = None,
    kv_replay: Annotated[str | None, typer.Option(help="ZMQ endpoint of the replay socket")] = None,
    kv_topic: Annotated[str, typer.Option(help="topic of the events")] = "",
    kv_connect: Annotated[bool, typer.Option(help="connect the publisher instead of binding it")] = False,
    array_events: Annotated[bool, typer.Option(help="events as arrays, as vLLM before 0.26")] = False,
    role: Annotated[Literal["mixed", "prefill", "decode"], typer.Option(help="what it does of a request")] = "mixed",
    pd: Annotated[
        Literal["nixl", "mooncake", "sglang", "lmcache"] | None,
        typer.Option(help="protocol by which KV is handed over"),
    ] = None,
    link_gb_s: Annotated[float, typer.Option(help="GB/s at which KV arrives from another worker")] = 25.0,
    lmcache_proxy: Annotated[
        str | None, typer.Option(help="with --pd lmcache: who is told that KV is written, tcp://host:port")
    ] = None,
    pull_back_s: Annotated[
        float, typer.Option(help="with --pd nixl: how long it keeps an answered turn's KV to be pulled; 0: not at all")
    ] = 0.0,
) -> None:
    """Run a simulated worker: to whoever looks from outside, a vLLM."""
    import uvloop

    from sim.server import SimWorker, WorkerSettings
    from sim.server import serve as serve_worker

    def announce(served: SimWorker) -> None:
        events = "" if served.publisher is None else f", KV events at {served.publisher.endpoint}"
        typer.echo(f"kvway worker: {model} at {served.url}{events}")

    try:
        settings = WorkerSettings(
            model=model,
            tokenizer=tokenizer,
            host=host,
            port=port,
            api_key=api_key,
            profile=profile,
            speed=speed,
            block_size=block_size,
            capacity_tokens=capacity_tokens,
            host_tokens=host_tokens,
            max_model_len=max_model_len,
            max_requests=max_requests,
            output_tokens=output_tokens,
            stream_interval=stream_interval,
            adapters=tuple(adapter or ()),
            kv_events=kv_events,
            kv_replay=kv_replay,
            kv_topic=kv_topic,
            kv_connect=kv_connect,
            event_format="array" if array_events else "map",
            role=role,
            pd=pd,
            link_gb_s=link_gb_s,
            lmcache_proxy=lmcache_proxy,
            pull_back_s=pull_back_s,
        )
        raise typer.Exit(uvloop.run(serve_worker(settings, announce)))
    except (ValueError, OSError) as error:
        _fail(f"kvway worker: {error}")


@app.command()
def demo(
    sessions: Annotated[int, typer.Option(min=1, help="agent sessions of the bundled workload")] = 28,
    turns: Annotated[int, typer.Option(min=1, help="requests per session")] = 9,
    speed: Annotated[float, typer.Option(min=0.1, help="how many times faster than a GPU the workers run")] = 4.0,
    texts: Annotated[
        Path, typer.Option(help="folder with recorded agent sessions (*.jsonl.gz), used where it exists")
    ] = Path("../shared/traces/agent_text"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Play one workload through four simulated workers twice: once with round-robin, once with expected-cost."""
    import json

    import uvloop
    from rich.console import Console

    from gateway.demo import DemoFailed, DemoOptions, print_result, run_demo

    options = DemoOptions(sessions=sessions, turns=turns, speed=speed, texts=texts)
    try:
        answer = uvloop.run(run_demo(options, Console(stderr=True)))
    except DemoFailed as error:
        _fail(f"kvway demo: {error}")
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        print_result(answer, Console())


app.command()(load)


def main() -> None:
    """Entry point of the ``kvway`` command."""
    app()


if __name__ == "__main__":
    main()
