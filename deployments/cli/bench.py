"""`remora bench`: the options of the benchmark tool. What they do is in deployments/bench.

Only light modules are imported here; each command imports the rest when it runs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.cli.terminal import Failure

if TYPE_CHECKING:
    from remora.deployments.bench.session import Outputs
    from remora.deployments.bench.size import Size
    from remora.deployments.bench.stats import Slo
    from remora.deployments.bench.targets import Target
    from remora.deployments.bench.workloads import Workload

app = typer.Typer(
    help="Measure engine and server, and hold them against the machine and against others.",
    no_args_is_help=True,
)
ALL = "all"
MAX_SWEEP_ROWS = 256

Model = Annotated[
    str, typer.Argument(help="Serve config (.yaml), Hugging Face folder, .gguf file, or built-in.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value on top of it; repeat for more."),
]
Json = Annotated[str | None, typer.Option("--json", help="Write the report here; - = stdout.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write it as one HTML file, with plots.")]
Url = Annotated[str | None, typer.Option(help="Measure this server instead of starting ours.")]
ServedModel = Annotated[str | None, typer.Option("--model", help="Model (default: first served).")]
ApiKey = Annotated[str | None, typer.Option(help="Sent as bearer token.")]
Names = Annotated[str, typer.Option("--workload", help="Names with commas between, or all.")]
Repeats = Annotated[int, typer.Option(min=1, help="Times that each workload runs.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same prompts.")]
Requests = Annotated[int | None, typer.Option("--requests", min=1, help="Number of requests.")]
Inputs = Annotated[int | None, typer.Option("--input", min=1, help="Tokens of each prompt.")]
Outs = Annotated[int | None, typer.Option("--output", min=1, help="Tokens of each answer.")]
Concurrency = Annotated[str, typer.Option(help="Streams at once; several with commas between.")]
TtftMs = Annotated[float, typer.Option("--slo-ttft-ms", min=0, help="SLO: ms to first token.")]
TpotMs = Annotated[float, typer.Option("--slo-tpot-ms", min=0, help="SLO: ms per token after.")]


@app.callback()
def bench() -> None:
    """Let SIGTERM end us as Ctrl-C does: what was started is stopped on the way out."""
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
    """Drive the engine in this process: how fast is it without a server?"""
    from remora.deployments.bench.session import begin, finish

    files, target = _outputs(json, html), _target(model, settings)
    size = _size(requests, inputs, outputs)
    workloads = [size.of(one) for one in _workloads(workload, only_offline=True)]
    report = begin(target.spec, repeats=repeats, seed=seed)

    from remora.deployments.bench.suites import offline_suite

    slo = _slo(slo_ttft_ms, slo_tpot_ms)
    offline_suite(report, target, workloads, repeats=repeats, seed=seed, slo=slo)
    finish(report, files)


@app.command()
def serve(
    model: Model = BUILTIN_MODEL,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = "1,8,32",
    workload: Annotated[
        str | None, typer.Option(help="Send these workloads of `offline` instead.")
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
    """Stream from a server: ours, started for it, or any at --url that speaks OpenAI's API."""
    from remora.deployments.bench.session import begin, finish

    files, size = _outputs(json, html), _size(requests, inputs, outputs)
    target = _target(model, settings) if url is None else None
    names = workload or ",".join(f"online-{number}" for number in _numbers(concurrency))
    workloads = [size.of(one) for one in _workloads(names)]
    report = begin(url or (target.spec if target else ""), repeats=repeats, seed=seed)

    from remora.deployments.bench.server_suites import online_suite, some_server

    with some_server(url, target, api_key) as server:
        online_suite(
            report,
            server,
            workloads,
            model=served_model,
            repeats=repeats,
            seed=seed,
            slo=_slo(slo_ttft_ms, slo_tpot_ms),
            target=target,
        )
    finish(report, files)


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
    """Look at one stream: time to first token, per token, and how much of it is the engine's."""
    from remora.deployments.bench.session import begin, finish
    from remora.deployments.bench.workloads import online

    files, size = _outputs(json, html), _size(requests, inputs, outputs)
    target = _target(model, settings) if url is None else None
    report = begin(url or (target.spec if target else ""))

    from remora.deployments.bench.server_suites import latency_suite, some_server

    with some_server(url, target, api_key) as server:
        latency_suite(report, server, size.of(online(1)), model=served_model)
    finish(report, files)


@app.command()
def startup(
    model: Model = BUILTIN_MODEL,
    settings: Settings = None,
    repeats: Repeats = 1,
    only: Annotated[str | None, typer.Option(help="offline or serve; default: both.")] = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Time a fresh process until its first token, offline and through Ray and Serve."""
    from remora.deployments.bench.session import begin, finish

    if only not in (None, "offline", "serve"):
        raise Failure(f"--only is {only!r}; it must be offline or serve")
    files, target = _outputs(json, html), _target(model, settings)
    report = begin(target.spec, repeats=repeats)

    from remora.deployments.bench.server_suites import startup_suite

    startup_suite(report, target, only=only, repeats=repeats)
    finish(report, files)


@app.command()
def sweep(
    model: Model = BUILTIN_MODEL,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    rows: Annotated[str, typer.Option(help="Rows that decode together.")] = (
        "1,2,4,8,16,32,64,128,256"
    ),
    concurrency: Concurrency = "1,2,4,8,16,32",
    settings: Settings = None,
    inputs: Inputs = 32,
    outputs: Outs = 24,
    json: Json = None,
    html: Html = None,
) -> None:
    """Plot the cost of a decode step over its rows; with --url, rates over the number of streams.

    With --url the sizes are those of `serve` unless given.
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
    from remora.deployments.bench.session import begin, finish

    files, numbers = _outputs(json, html), _numbers(rows)
    # Settings of the caller come later and win.
    enough = [f"engine.max_running_requests={max(numbers)}"]
    target = _target(model, enough + (settings or []))
    report = begin(target.spec)

    from remora.deployments.bench.suites import sweep_suite

    sweep_suite(report, target, numbers, inputs=inputs or 32, outputs=outputs or 24)
    finish(report, files)


@app.command()
def quality(
    model: Model = BUILTIN_MODEL,
    modes: Annotated[
        str, typer.Option(help="Values of model.quantization, with commas between.")
    ] = "none,int8,int4",
    against: Annotated[
        list[str] | None,
        typer.Option(help="section.key=value of the reference, besides quantization none."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file; default: a text of ours.")] = None,
    settings: Settings = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Measure what quantised weights cost: perplexity, and agreement with unquantised ones."""
    from remora.deployments.bench.session import begin, finish

    def variant(name: str, *more: str) -> Target:
        return _target(model, [*(settings or ()), f"model.quantization={name.strip()}", *more])

    files, reference = _outputs(json, html), variant("none", *(against or ()))
    targets = {name.strip(): variant(name) for name in modes.split(",")}
    report = begin(_target(model, settings).spec)

    from remora.deployments.bench.quality import TEXT, quality_suite

    quality_suite(report, reference, targets, text=text or TEXT)
    finish(report, files)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="URL, CONFIG,section.key=value,... or cmd:COMMAND.")],
    b: Annotated[str, typer.Argument(help="Likewise.")],
    workload: Names = "decode,prefill,batch",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 2,
    model_a: Annotated[str | None, typer.Option(help="Model at URL A.")] = None,
    model_b: Annotated[str | None, typer.Option(help="Model at URL B.")] = None,
    api_key: ApiKey = None,
    requests: Requests = None,
    inputs: Inputs = None,
    outputs: Outs = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Run A B A B and print the ratios of their medians, with the spread between rounds.

    A command prints {"workload": {"figure": number}}; {workloads} and {seed} in it are filled in.
    """
    from remora.deployments.bench.contestants import read_contestant
    from remora.deployments.bench.session import begin, finish

    files, workloads = _outputs(json, html), _workloads(workload)
    size = _size(requests, inputs, outputs)
    sides = (
        read_contestant(a, size, model=model_a, api_key=api_key),
        read_contestant(b, size, model=model_b, api_key=api_key),
    )
    report = begin(f"{a} against {b}", A=a, B=b, rounds=rounds)

    from remora.deployments.bench.server_suites import compare_suite

    compare_suite(report, *sides, workloads, num_rounds=rounds)
    finish(report, files)


def _outputs(json: str | None, html: Path | None) -> Outputs:
    from remora.deployments.bench.session import Outputs

    outputs = Outputs(json=json, html=html)
    outputs.check()
    return outputs


def _target(model: str, settings: list[str] | None) -> Target:
    from remora.deployments.bench.targets import read_target

    return read_target(model, settings or ())


def _size(requests: int | None, inputs: int | None, outputs: int | None) -> Size:
    from remora.deployments.bench.size import Size

    return Size(requests=requests, inputs=inputs, outputs=outputs)


def _slo(ttft_ms: float, tpot_ms: float) -> Slo:
    from remora.deployments.bench.stats import Slo

    return Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def _workloads(names: str, *, only_offline: bool = False) -> list[Workload]:
    """Find workloads by name. Raises Failure naming those that there are."""
    from remora.deployments.bench.workloads import OFFLINE, find

    found = []
    for name in OFFLINE if names == ALL else names.split(","):
        workload = find(name.strip())
        if workload is None or (only_offline and workload.concurrency is not None):
            more = "" if only_offline else ", online-1, online-8, online-32 (any number)"
            raise Failure(f"no workload {name!r}; there are {', '.join(OFFLINE)}{more}, and all")
        found.append(workload)
    return found


def _numbers(text: str) -> list[int]:
    """Read 1,8,32. Raises Failure."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise Failure(f"{text!r}: expected whole numbers above 0 with commas between, as in 1,8,32")
    return sorted({int(part) for part in parts})
