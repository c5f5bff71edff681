"""Options that the `remora bench` commands share, and how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remora.deployments.cli.terminal import Failure

if TYPE_CHECKING:
    from remora.deployments.bench.session import Outputs
    from remora.deployments.bench.stats import Slo
    from remora.deployments.bench.targets import Target
    from remora.deployments.bench.workloads import Size, Workload

ALL = "all"

Model = Annotated[
    str, typer.Argument(help="Serve config (.yaml), Hugging Face folder, .gguf file or built-in.")
]
Json = Annotated[str | None, typer.Option("--json", help="Write the report as JSON; - = stdout.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML file.")]
Url = Annotated[str | None, typer.Option(help="Measure a running server.")]
Names = Annotated[str, typer.Option("--workload", help="Comma-separated names, or all.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each workload.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the prompts.")]
Requests = Annotated[int | None, typer.Option("--requests", min=1, help="Number of requests.")]
Inputs = Annotated[int | None, typer.Option("--input", min=1, help="Tokens per prompt.")]
Outs = Annotated[int | None, typer.Option("--output", min=1, help="Tokens per reply.")]
Concurrency = Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")]
TtftMs = Annotated[float, typer.Option("--slo-ttft-ms", min=0, help="SLO: time to first token.")]
TpotMs = Annotated[float, typer.Option("--slo-tpot-ms", min=0, help="SLO: time per output token.")]


def read_outputs(json: str | None, html: Path | None) -> Outputs:
    """Return where the report is written. Raises Failure if it cannot be written there."""
    from remora.deployments.bench.session import Outputs

    outputs = Outputs(json=json, html=html)
    outputs.check()
    return outputs


def read_target(model: str, settings: list[str] | None) -> Target:
    """Return the target of a measurement. Raises Failure."""
    from remora.deployments.bench import targets

    return targets.read_target(model, settings or ())


def read_size(requests: int | None, inputs: int | None, outputs: int | None) -> Size:
    """Return the sizes given on the command line."""
    from remora.deployments.bench.workloads import Size

    return Size(requests=requests, inputs=inputs, outputs=outputs)


def read_slo(ttft_ms: float, tpot_ms: float) -> Slo:
    """Return the service level objective."""
    from remora.deployments.bench.stats import Slo

    return Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def read_workloads(names: str, *, only_offline: bool = False) -> list[Workload]:
    """Find workloads by name. Raises Failure, which lists the known ones."""
    from remora.deployments.bench.workloads import OFFLINE, find

    found = []
    for name in OFFLINE if names == ALL else names.split(","):
        workload = find(name.strip())
        if workload is None or (only_offline and workload.concurrency is not None):
            more = "" if only_offline else ", online-1, online-8, online-32 (any number)"
            raise Failure(f"unknown workload {name!r}; known: {', '.join(OFFLINE)}{more}, all")
        found.append(workload)
    return found


def read_numbers(text: str) -> list[int]:
    """Parse a list such as 1,8,32 and sort it. Raises Failure."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise Failure(f"{text!r}: expected positive integers separated by commas, such as 1,8,32")
    return sorted({int(part) for part in parts})
