"""Options that the `remora bench` commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remora.deployments.bench.workloads import OFFLINE, Workload, find
from remora.deployments.cli.terminal import Failure

if TYPE_CHECKING:
    from remora.deployments.bench.report.record import Report

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


@contextmanager
def reported(
    json: str | None, html: Path | None, target: str, **settings: object
) -> Iterator[Report]:
    """Yield a new report, and show and write it at the end. Raises Failure.

    json, html:  where it is written; checked at the beginning
    """
    from remora.deployments.bench.session import Outputs, begin, finish

    outputs = Outputs(json=json, html=html)
    outputs.check()
    report = begin(target, **settings)
    yield report
    finish(report, outputs)


def read_workloads(names: str, *, only_offline: bool = False) -> list[Workload]:
    """Find workloads by name. Raises Failure, which lists the known ones."""
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
