"""What the commands of `remora bench` have in common: options, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remora.deployments.cli.terminal import Failure

if TYPE_CHECKING:
    from remora.deployments.bench.session import Outputs
    from remora.deployments.bench.size import Size
    from remora.deployments.bench.stats import Slo
    from remora.deployments.bench.targets import Target
    from remora.deployments.bench.workloads import Workload

ALL = "all"

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
ApiKey = Annotated[
    str | None, typer.Option(envvar="REMORA_API_KEY", help="Key that the server asks for.")
]
Names = Annotated[str, typer.Option("--workload", help="Names with commas between, or all.")]
Repeats = Annotated[int, typer.Option(min=1, help="Times that each workload runs.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same prompts.")]
Requests = Annotated[int | None, typer.Option("--requests", min=1, help="Number of requests.")]
Inputs = Annotated[int | None, typer.Option("--input", min=1, help="Tokens of each prompt.")]
Outs = Annotated[int | None, typer.Option("--output", min=1, help="Tokens of each answer.")]
Concurrency = Annotated[str, typer.Option(help="Streams at once; several with commas between.")]
TtftMs = Annotated[float, typer.Option("--slo-ttft-ms", min=0, help="SLO: ms to first token.")]
TpotMs = Annotated[float, typer.Option("--slo-tpot-ms", min=0, help="SLO: ms per token after.")]


def read_outputs(json: str | None, html: Path | None) -> Outputs:
    """Say where the report goes. Raises Failure if it cannot go there."""
    from remora.deployments.bench.session import Outputs

    outputs = Outputs(json=json, html=html)
    outputs.check()
    return outputs


def read_target(model: str, settings: list[str] | None) -> Target:
    """Read what is measured, with its settings. Raises Failure."""
    from remora.deployments.bench import targets

    return targets.read_target(model, settings or ())


def read_size(requests: int | None, inputs: int | None, outputs: int | None) -> Size:
    """Gather the sizes that were given."""
    from remora.deployments.bench.size import Size

    return Size(requests=requests, inputs=inputs, outputs=outputs)


def read_slo(ttft_ms: float, tpot_ms: float) -> Slo:
    """Gather the service level."""
    from remora.deployments.bench.stats import Slo

    return Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def read_workloads(names: str, *, only_offline: bool = False) -> list[Workload]:
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


def read_numbers(text: str) -> list[int]:
    """Read 1,8,32. Raises Failure."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise Failure(f"{text!r}: expected whole numbers above 0 with commas between, as in 1,8,32")
    return sorted({int(part) for part in parts})
