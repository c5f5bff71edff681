"""`remora bench`: command-line options of the benchmarks in deployments/bench.

This module imports only light modules; each command imports the rest when it runs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.bench.stats import Slo
from remora.deployments.bench.targets import Target, read_target
from remora.deployments.bench.workloads import Size, online
from remora.deployments.cli.bench_options import (
    ALL,
    Concurrency,
    Html,
    Inputs,
    Json,
    Model,
    Names,
    Outs,
    Repeats,
    Requests,
    Seed,
    TpotMs,
    TtftMs,
    Url,
    read_numbers,
    read_workloads,
    reported,
)
from remora.deployments.cli.options import ApiKey, ServedModel, Settings
from remora.deployments.cli.terminal import Failure

app = typer.Typer(
    help="Benchmark the engine and servers, and compare them with hardware limits.",
    no_args_is_help=True,
)


@app.callback()
def bench() -> None:
    """Handle SIGTERM like Ctrl-C, so that started processes are stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@app.command()
def offline(
    model: Model = BUILTIN_MODEL,
    workload: Names = ALL,
    settings: Settings = None,
    requests: Requests = None,
    inputs: Inputs = None,
    outputs: Outs = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    slo_ttft_ms: TtftMs = 1000.0,
    slo_tpot_ms: TpotMs = 100.0,
    json: Json = None,
    html: Html = None,
) -> None:
    """Benchmark the engine in this process, without a server."""
    target = read_target(model, settings or ())
    size = Size(requests=requests, inputs=inputs, outputs=outputs)
    workloads = [size.of(one) for one in read_workloads(workload, only_offline=True)]
    slo = Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms)
    with reported(json, html, target.spec, repeats=repeats, seed=seed) as report:
        from remora.deployments.bench.suites import offline_suite

        offline_suite(report, target, workloads, repeats=repeats, seed=seed, slo=slo)


@app.command()
def serve(
    model: Model = BUILTIN_MODEL,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = "1,8,32",
    workload: Annotated[
        str | None, typer.Option(help="Send these workloads of `bench offline` instead.")
    ] = None,
    settings: Settings = None,
    requests: Requests = None,
    inputs: Inputs = None,
    outputs: Outs = None,
    repeats: Repeats = 1,
    seed: Seed = 0,
    slo_ttft_ms: TtftMs = 1000.0,
    slo_tpot_ms: TpotMs = 100.0,
    json: Json = None,
    html: Html = None,
) -> None:
    """Benchmark streaming from a new remora server, or from any OpenAI-compatible one at --url."""
    target = read_target(model, settings or ()) if url is None else None
    size = Size(requests=requests, inputs=inputs, outputs=outputs)
    names = workload or ",".join(f"online-{number}" for number in read_numbers(concurrency))
    workloads = [size.of(one) for one in read_workloads(names)]
    with reported(json, html, _address(url, target), repeats=repeats, seed=seed) as report:
        from remora.deployments.bench.server_suites import online_suite, some_server

        with some_server(url, target, api_key) as server:
            online_suite(
                report,
                server,
                workloads,
                model=served_model,
                repeats=repeats,
                seed=seed,
                slo=Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms),
                target=target,
            )


def _address(url: str | None, target: Target | None) -> str:
    return url or (target.spec if target else "")


@app.command()
def latency(
    model: Model = BUILTIN_MODEL,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    settings: Settings = None,
    requests: Requests = 5,
    inputs: Inputs = None,
    outputs: Outs = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Measure one stream: time to first token, time per token, and the engine's share of both."""
    target = read_target(model, settings or ()) if url is None else None
    workload = online(1).resized(requests, inputs, outputs)
    with reported(json, html, _address(url, target)) as report:
        from remora.deployments.bench.server_suites import latency_suite, some_server

        with some_server(url, target, api_key) as server:
            latency_suite(report, server, workload, model=served_model)


@app.command()
def startup(
    model: Model = BUILTIN_MODEL,
    settings: Settings = None,
    repeats: Repeats = 1,
    only: Annotated[str | None, typer.Option(help="offline or serve. Default: both.")] = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Measure a new process from its start to its first token, offline and on Ray Serve."""
    if only not in (None, "offline", "serve"):
        raise Failure(f"--only {only}: must be offline or serve")
    target = read_target(model, settings or ())
    with reported(json, html, target.spec, repeats=repeats) as report:
        from remora.deployments.bench.server_suites import startup_suite

        startup_suite(report, target, only=only, repeats=repeats)


@app.command()
def sweep(
    model: Model = BUILTIN_MODEL,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    rows: Annotated[str, typer.Option(help="Batch sizes of a decode step.")] = (
        "1,2,4,8,16,32,64,128,256"
    ),
    concurrency: Concurrency = "1,2,4,8,16,32",
    settings: Settings = None,
    inputs: Inputs = 32,
    outputs: Outs = 24,
    json: Json = None,
    html: Html = None,
) -> None:
    """Plot the cost of a decode step over its batch size.

    With --url: plot throughput over the number of streams, with the sizes of `bench serve`.
    """
    if url is not None:
        serve(
            url=url,
            served_model=served_model,
            api_key=api_key,
            concurrency=concurrency,
            json=json,
            html=html,
        )
        return
    numbers = read_numbers(rows)
    # Settings from the command line come later and take precedence.
    enough = [f"engine.max_running_requests={max(numbers)}"]
    target = read_target(model, enough + (settings or []))
    with reported(json, html, target.spec) as report:
        from remora.deployments.bench.suites import sweep_suite

        sweep_suite(report, target, numbers, inputs=inputs or 32, outputs=outputs or 24)


@app.command()
def quality(
    model: Model = BUILTIN_MODEL,
    modes: Annotated[
        str, typer.Option(help="Comma-separated values of model.quantization.")
    ] = "none,int8,int4",
    against: Annotated[
        list[str] | None,
        typer.Option(help="Extra section.key=value settings of the unquantized reference."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text file. Default: a built-in text.")
    ] = None,
    settings: Settings = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Measure the quality loss of quantization: perplexity, and agreement with the reference."""

    def variant(name: str, *more: str) -> Target:
        return read_target(model, [*(settings or ()), f"model.quantization={name.strip()}", *more])

    reference = variant("none", *(against or ()))
    targets = {name.strip(): variant(name) for name in modes.split(",")}
    with reported(json, html, read_target(model, settings or ()).spec) as report:
        from remora.deployments.bench.quality import TEXT, quality_suite

        quality_suite(report, reference, targets, text=text or TEXT)


@app.command()
def compare(
    a: Annotated[
        str, typer.Argument(help="URL, CONFIG,section.key=value,..., REPORT.json, cmd:COMMAND.")
    ],
    b: Annotated[str, typer.Argument(help="Same as A.")],
    workload: Names = "decode,prefill,batch",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 2,
    model_a: Annotated[str | None, typer.Option(help="Model at URL A.")] = None,
    model_b: Annotated[str | None, typer.Option(help="Model at URL B.")] = None,
    api_key: ApiKey = None,
    requests: Requests = None,
    inputs: Inputs = None,
    outputs: Outs = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Run A and B in turns, and print the ratios of their medians with the spread of the rounds.

    A command must print {"workload": {"figure": number}}; {workloads} and {seed} in it are
    replaced.
    """
    from remora.deployments.bench.contestants import read_contestant

    workloads = read_workloads(workload)
    size = Size(requests=requests, inputs=inputs, outputs=outputs)
    sides = (
        read_contestant(a, size, model=model_a, api_key=api_key),
        read_contestant(b, size, model=model_b, api_key=api_key),
    )
    with reported(json, html, f"{a} against {b}", A=a, B=b, rounds=rounds) as report:
        from remora.deployments.bench.server_suites import compare_suite

        compare_suite(report, *sides, workloads, num_rounds=rounds)
