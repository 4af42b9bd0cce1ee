"""The command ``kvway plan``: what a fleet needs, worked out with formulas."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from policies.cost import ModelShape
    from sim.plan_disaggregation import Demand, Disaggregation

plan_app = typer.Typer(
    help="Work out footprints, break-even points, fleet and tier sizes from formulas and measured constants.",
    no_args_is_help=True,
)

_GB = 1e9
_MOST: Final = 10**9
"""Of whatever is counted, priced or timed: more means nothing and leaves the range of floats."""

ModelOption = Annotated[str, typer.Option(help="model, for instance llama-3.1-70b, qwen3-32b")]
PrecisionOption = Annotated[str, typer.Option(help="of the KV cache: fp16, bf16, fp8, int4")]
ProfileOption = Annotated[str, typer.Option(help="worker: model/gpu/tensor-parallel")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
TokensOption = Annotated[int, typer.Option(min=1, max=_MOST, help="length of the sequence")]


def fail(message: object) -> NoReturn:
    """Print what is wrong and exit with 2."""
    typer.echo(f"kvway plan: {message}", err=True)
    raise typer.Exit(2)


def _shape(model: str, precision: str) -> ModelShape:
    from sim.shapes import PRECISIONS, find_shape

    if precision not in PRECISIONS:
        fail(f"unknown precision {precision!r}. Known: {', '.join(PRECISIONS)}.")
    try:
        return replace(find_shape(model), element_bytes=PRECISIONS[precision])
    except ValueError as error:
        fail(error)


def _print(title: str, columns: list[str], rows: list[list[str]], caption: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


@plan_app.command()
def footprint(
    model: ModelOption = "llama-3.1-70b",
    tokens: TokensOption = 32_768,
    batch: Annotated[int, typer.Option(min=1, max=_MOST, help="sequences")] = 1,
    block: Annotated[int, typer.Option(min=1, max=_MOST, help="tokens per KV block of the engine")] = 16,
    precision: PrecisionOption = "fp16",
    as_json: JsonOption = False,
) -> None:
    """KV cache that sequences take, exactly and in whole blocks."""
    from sim import plan

    shape = _shape(model, precision)
    found = plan.footprint(shape, tokens, batch, block)
    if as_json:
        typer.echo(json.dumps({"kv_bytes_per_token": shape.kv_bytes_per_token, **asdict(found)}))
        return
    rows = [
        ["KV bytes per token", f"{shape.kv_bytes_per_token:,.0f}"],
        ["KV cache", f"{found.exact_bytes / _GB:,.2f} GB"],
        [f"in blocks of {block} tokens", f"{found.paged_bytes / _GB:,.2f} GB"],
        ["added by paging", f"{found.overhead:.4%} (at most {found.overhead_bound:.4%})"],
    ]
    _print(f"{batch} x {tokens:,} tokens of {model}, {precision}", ["", "value"], rows)


@plan_app.command("break-even")
def break_even(
    model: ModelOption = "llama-3.1-70b",
    tokens: TokensOption = 32_768,
    tflops: Annotated[
        float, typer.Option(min=0.001, max=_MOST, help="attainable TFLOPS of a worker, not the data sheet's")
    ] = 400,
    profile: Annotated[str, typer.Option(help="fitted prefill times of model/gpu/tensor-parallel, not TFLOPS")] = "",
    attention: Annotated[bool, typer.Option(help="count the quadratic term of attention")] = False,
    reuse: Annotated[float, typer.Option(min=0, max=1, help="probability that the prefix is asked for again")] = 1.0,
    tier: Annotated[list[str] | None, typer.Option(help="name=GB/s of a tier of your own; may be repeated")] = None,
    precision: PrecisionOption = "fp16",
    as_json: JsonOption = False,
) -> None:
    """Reload a prefix from a tier, or recompute it? Every tier against the prefill."""
    from sim import plan
    from sim.profiles import LINKS, find_profile

    shape = _shape(model, precision)
    try:
        fitted = find_profile(profile) if profile else None
        links = dict(map(_tier, tier)) if tier else dict(LINKS)
    except ValueError as error:
        fail(error)
    found = plan.break_even(shape, tokens, links, flops=tflops * 1e12, profile=fitted, attention=attention, reuse=reuse)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    rows = [
        [
            each.tier,
            f"{each.link.bytes_per_s / _GB:,.2f}",
            f"{each.seconds:,.4f}",
            f"{each.speedup:,.1f}x",
            "reload" if each.pays else "recompute",
            f"{each.benefit_s:,.3f}",
        ]
        for each in found.tiers
    ]
    _print(
        f"{tokens:,} tokens of {model}: {found.size_bytes / _GB:,.2f} GB, recomputed in {found.recompute_s:,.2f} s",
        ["tier", "GB/s", "reload s", "speed-up", "faster", "benefit s"],
        rows,
        f"Reloading is faster from tiers above {found.bytes_per_s / _GB:,.2f} GB/s.",
    )


def _tier(text: str, option: str = "--tier nvme=14") -> tuple[str, Any]:
    from sim.profiles import Link

    name, _, speed = text.partition("=")
    try:
        gb_s = float(speed)
    except ValueError:
        gb_s = 0.0
    if not name or not 1 / _MOST <= gb_s <= _MOST:
        raise ValueError(f"{option.split()[0]} {text!r} is not name=GB/s; write for instance {option}")
    return name, Link(gb_s * _GB, 0.0)


@plan_app.command()
def disaggregation(
    profile: ProfileOption = "llama-3.1-70b/h100/4",
    prompt: Annotated[int, typer.Option(min=1, max=_MOST, help="tokens of a prompt")] = 8_000,
    uncached: Annotated[int, typer.Option(min=0, max=_MOST, help="of them, those cached nowhere; 0: all")] = 0,
    output: Annotated[int, typer.Option(min=1, max=_MOST, help="tokens of an answer")] = 300,
    itl: Annotated[
        float, typer.Option(min=0.0001, max=_MOST, help="target for the mean time between tokens, seconds")
    ] = 0.03,
    ttft: Annotated[
        float, typer.Option(min=0.001, max=_MOST, help="target for the time to first token, seconds")
    ] = 2.0,
    link: Annotated[list[str] | None, typer.Option(help="name=GB/s of a link of your own; may be repeated")] = None,
    streams: Annotated[
        int, typer.Option(min=0, max=_MOST, help="requests that decode beside it, 0: as many as ITL allows")
    ] = 0,
    interference: Annotated[
        float,
        typer.Option(min=0, max=_MOST, help="as disaggregation.interference: cost of a second of prefill to others"),
    ] = 0.1,
    utilisation: Annotated[float, typer.Option(min=0.01, max=1, help="of prefill workers")] = 0.7,
    capacity: Annotated[
        int, typer.Option(min=0, max=_MOST, help="KV tokens of a worker, 0: what fits into its HBM")
    ] = 0,
    precision: PrecisionOption = "fp16",
    as_json: JsonOption = False,
) -> None:
    """Prefill and decode on different workers: what moving the KV costs by link, and what it gains."""
    from sim.plan_disaggregation import Demand
    from sim.plan_disaggregation import disaggregation as hold_apart
    from sim.profiles import LINKS, NETWORK_LINKS, find_profile
    from sim.shapes import kv_capacity_tokens

    shape = _shape(profile.split("/")[0], precision)
    if uncached > prompt:
        fail(f"--uncached {uncached} is more than the {prompt} tokens of the prompt")
    demand = Demand(prompt, uncached or prompt, output, itl, ttft)
    try:
        links = dict(_tier(each, "--link rdma=50") for each in link) if link else {k: LINKS[k] for k in NETWORK_LINKS}
        speed = find_profile(profile)
        tokens = capacity or kv_capacity_tokens(profile)
        found = hold_apart(
            speed,
            shape.kv_bytes_per_token,
            tokens,
            demand,
            links,
            streams=streams,
            interference=interference,
            utilisation=utilisation,
        )
    except ValueError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps({"profile": profile, "apart_rate": found.apart_rate, **asdict(found)}))
        return
    _print_disaggregation(profile, demand, found)


def _print_disaggregation(profile: str, demand: Demand, found: Disaggregation) -> None:
    _print(
        f"{profile}: {demand.uncached_tokens:,} of {demand.prompt_tokens:,} tokens, "
        f"{found.transfer_bytes / _GB:,.2f} GB, prefill {found.prefill_s:.3f} s",
        ["link", "GB/s", "transfer ms", "of TTFT", "TTFT s", "from streams", "from tokens"],
        [
            [
                each.link,
                f"{each.bytes_per_s / _GB:,.1f}",
                f"{each.transfer_s * 1e3:,.1f}",
                f"{each.ttft_share:.1%}",
                f"{each.ttft_s:.3f}",
                "never" if each.break_even_streams is None else f"{each.break_even_streams:.1f}",
                "never" if each.break_even_tokens is None else f"{each.break_even_tokens:,}",
            ]
            for each in found.handovers
        ],
        f"TTFT on a worker that decodes {found.batch} others: {found.ttft_whole_s:.3f} s. From streams: it pays "
        "beside so many. From tokens: beside as many as there are, for so many uncached ones.",
    )
    _print(
        f"{found.batch} requests that decode together",
        ["", "apart", "on one worker"],
        [
            ["ITL, ms", f"{found.itl_apart_s * 1e3:.1f}", f"{found.itl_whole_s * 1e3:.1f}"],
            ["longest step, ms", f"{found.itl_apart_s * 1e3:.1f}", f"{found.pause_whole_s * 1e3:.1f}"],
            ["requests/s per worker, at the ITL target", f"{found.apart_rate:.2f}", f"{found.whole_rate:.2f}"],
            ["prefill workers per decode worker", f"{found.prefill_per_decode:.2f}", ""],
        ],
    )


@plan_app.command()
def fleet(
    rate: Annotated[float, typer.Option(min=0.0001, max=_MOST, help="requests per second of the whole fleet")] = 10.0,
    prompt: Annotated[int, typer.Option(min=1, max=_MOST, help="tokens of a prompt, on average")] = 8_000,
    output: Annotated[int, typer.Option(min=1, max=_MOST, help="tokens of an answer, on average")] = 300,
    hit: Annotated[float, typer.Option(min=0, max=1, help="share of prompt tokens found in cache")] = 0.0,
    ttft: Annotated[
        float, typer.Option(min=0.001, max=_MOST, help="target for the time to first token, seconds")
    ] = 2.0,
    itl: Annotated[
        float, typer.Option(min=0.0001, max=_MOST, help="target for the mean time between tokens, seconds")
    ] = 0.05,
    quantile: Annotated[float, typer.Option(min=0, max=0.9999, help="of TTFT that must meet its target")] = 0.9,
    variation: Annotated[float, typer.Option(min=0, max=_MOST, help="coefficient of variation of prefill times")] = 1.0,
    capacity: Annotated[
        int, typer.Option(min=0, max=_MOST, help="KV tokens of a worker, 0: what fits into its HBM")
    ] = 0,
    profile: ProfileOption = "llama-3.1-70b/h100/4",
    as_json: JsonOption = False,
) -> None:
    """The smallest fleet that meets targets for TTFT and ITL."""
    from sim import plan
    from sim.profiles import find_profile
    from sim.shapes import kv_capacity_tokens

    traffic = plan.Traffic(rate, prompt, output, hit, variation)
    try:
        speed = find_profile(profile)
        tokens = capacity or kv_capacity_tokens(profile)
        found = plan.size_fleet(speed, traffic, ttft, itl, tokens, quantile)
    except ValueError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps({"profile": profile, "kv_capacity_tokens": tokens, **asdict(found)}))
        return
    rows = [
        ["workers", f"{found.workers:,}", ""],
        ["GPUs", f"{found.gpus:,}", ""],
        [f"TTFT, p{quantile * 100:g}", f"{found.ttft_quantile_s:.3f} s", f"{ttft:g} s"],
        ["TTFT, mean", f"{found.ttft_s:.3f} s", ""],
        ["ITL, mean", f"{found.itl_s * 1e3:.1f} ms", f"{itl * 1e3:g} ms"],
        ["utilisation", f"{found.utilisation:.0%}", ""],
        ["requests in decode per worker", f"{found.batch:.1f}", ""],
        ["KV tokens in use per worker", f"{found.kv_tokens:,.0f}", f"{tokens:,}"],
    ]
    _print(f"{rate:g} requests/s of {prompt:,} + {output:,} tokens on {profile}", ["", "value", "bound"], rows)


@plan_app.command()
def tiers(
    traffic: Annotated[str, typer.Argument(help="trace file or generated traffic, as in `kvway sim run`")],
    workers: Annotated[
        int, typer.Option(min=1, max=_MOST, help="workers; their HBM together is what the tier stands below")
    ] = 8,
    profile: ProfileOption = "llama-3.1-70b/h100/4",
    link: Annotated[str, typer.Option(help="the tier: host, nvme-gen4, roce-200g …")] = "host",
    gb_month: Annotated[
        float, typer.Option(min=0, max=_MOST, help="price of a GB of the tier per month, any currency")
    ] = 3.0,
    gpu_hour: Annotated[float, typer.Option(min=0, max=_MOST, help="price of a GPU hour, the same currency")] = 2.5,
    sizes: Annotated[str, typer.Option(help="sizes of the tier, in multiples of all HBM")] = "0,0.5,1,2,4,8,16",
    load: Annotated[float, typer.Option(help="times as many requests per second")] = 1.0,
    ws: Annotated[float, typer.Option(help="times as large a working set, at the same rate")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """How large a tier below HBM should be: what it costs against the GPU time it saves."""
    from sim import plan
    from sim.profiles import LINKS, find_profile
    from sim.reuse import lru_hit_rates
    from sim.scenario import Traffic
    from sim.shapes import kv_capacity_tokens

    try:
        speed = find_profile(profile)
        if link not in LINKS:
            raise ValueError(f"unknown tier {link!r}. Known tiers: {', '.join(LINKS)}.")
        multiples = _sizes(sizes)
        trace = Traffic(traffic, load=load, working_set=ws).trace(0)
        duration_s = trace.requests[-1].arrival_s
        if not duration_s:
            raise ValueError(f"the requests of {traffic!r} all come at once: there is no rate to plan for")
    except ValueError as error:
        fail(error)
    hbm = workers * kv_capacity_tokens(profile)
    hits = lru_hit_rates(trace, [hbm * (1 + multiple) for multiple in multiples])
    rate = len(trace.requests) / duration_s
    prompt = sum(request.prompt_tokens for request in trace.requests) / len(trace.requests)
    curve = [(round(hbm * multiple), hit) for multiple, hit in zip(multiples, hits, strict=True)]
    prices = plan.Prices(gpu_hour, gb_month)
    options = plan.size_tier(speed, LINKS[link], prices, rate, prompt, lru_hit_rates(trace, [hbm])[0], curve)
    best = min(options, key=lambda option: option.cost)
    if as_json:
        rows = [{**asdict(option), "cost": option.cost} for option in options]
        typer.echo(json.dumps({"hbm_tokens": hbm, "requests_per_s": rate, "options": rows, "best": best.size_tokens}))
        return
    _print(
        f"{link} below {hbm * speed.kv_bytes_per_token / _GB:,.0f} GB of HBM, for {rate:.2f} requests/s",
        ["x HBM", "GB", "hit rate", "tier/month", "GPUs/month", "together"],
        [
            [
                f"{multiple:g}" + (" *" if option is best else ""),
                f"{option.size_bytes / _GB:,.0f}",
                f"{option.hit:.1%}",
                f"{option.tier_cost:,.0f}",
                f"{option.gpu_cost:,.0f}",
                f"{option.cost:,.0f}",
            ]
            for multiple, option in zip(multiples, options, strict=True)
        ],
        "* the cheapest. GPUs: their time for prefill and reloading, as if bought by the second.",
    )


def _sizes(words: str) -> list[float]:
    try:
        sizes = [float(word) for word in words.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 <= size <= _MOST for size in sizes):
        raise ValueError(f"--sizes {words!r}: write numbers from 0 upwards, separated by commas")
    return sizes
