"""Time from process start to the first token: offline, and on Ray Serve."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remora.deployments.bench.http_client import exchange, parse_url
from remora.deployments.bench.machine import peak_memory
from remora.deployments.bench.report.figures import number
from remora.deployments.bench.report.record import Result, TextTable
from remora.deployments.bench.server_process import OwnServer, running_server
from remora.deployments.bench.stats import median_figures
from remora.deployments.bench.targets import Target
from remora.deployments.cli.terminal import Failure

_PROBE = "from remora.deployments.bench.startup_probe import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start. `phases` is name -> seconds, in order; their sum is `figures["..._s"]`."""

    figures: dict[str, float]
    phases: Mapping[str, float]
    note: str | None = None


def start_offline(target: Target) -> Start:
    """Start an engine in a new process, without Ray. Raises Failure."""
    args = json.dumps(target.raw_args)
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", _PROBE, args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout else ""
            seconds = time.perf_counter() - started
            peak = peak_memory(process.pid)
            process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
        if not line.startswith("{"):
            errors.seek(0)
            last = errors.read().strip().splitlines() or ["no output"]
            raise Failure(f"the engine did not start: {last[-1]}")
    phases: dict[str, float] = json.loads(line)["phases"]
    phases = {"start Python": seconds - sum(phases.values()), **phases}
    figures = {"offline_s": seconds} | (peak.figures() if peak else {})
    return Start(figures=figures, phases=phases)


def start_server(target: Target) -> Start:
    """Start `remora serve` and request one token once it is healthy. Raises Failure."""
    with running_server(target) as server:
        asyncio.run(_first_token(server))
        seconds = time.perf_counter() - server.started
        peak = peak_memory(server.pid)
        banner = server.start_up_line()
    return Start(
        figures={"serve_s": seconds} | (peak.figures() if peak else {}),
        phases={"until healthy": server.ready_s, "first token": seconds - server.ready_s},
        note=f"of which in the replica: {banner}" if banner else None,
    )


def measure_start(
    name: str, start: Callable[[], Start], repeats: int, on_finish: Callable[[], None]
) -> tuple[Result, TextTable]:
    """Start `repeats` times; return the medians and a table of the phases."""
    starts = []
    for _ in range(repeats):
        starts.append(start())
        on_finish()
    notes = (note,) if (note := starts[-1].note) else ()
    result = Result.of_runs(name, f"{repeats} starts", [one.figures for one in starts], notes)
    return result, _phase_table(name, [one.phases for one in starts])


def _phase_table(name: str, phases: Sequence[Mapping[str, float]]) -> TextTable:
    medians = median_figures([dict(one) for one in phases])
    rows = [(phase, number(seconds)) for phase, seconds in medians.items()]
    total = ("total", number(sum(medians.values())))
    return TextTable(
        title=f"Start to first token: {name}", header=("phase", "s"), rows=(*rows, total)
    )


async def _first_token(server: OwnServer) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    endpoint = parse_url(server.url)
    models = await exchange(endpoint, "GET", "/v1/models")
    body["model"] = json.loads(bytes(models.body))["data"][0]["id"]
    reply = await exchange(endpoint, "POST", "/v1/completions", body)
    if reason := reply.refusal() or reply.error:
        raise Failure(f"the server sent no token: {reason}")
