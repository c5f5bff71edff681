"""One stream, looked at closely: what the engine takes for a token, and what the way to it adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from remora.deployments.bench.http_client import Endpoint, exchange
from remora.deployments.bench.online import Server, measure
from remora.deployments.bench.report.figures import number, percent
from remora.deployments.bench.report.record import Bar, BarChart, Result, TextTable
from remora.deployments.bench.workloads import Workload

_STEPS, _SECONDS = "remora_steps_total", "remora_step_time_seconds_total"


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """Steps that an engine has run since it started, and the seconds they took."""

    num_steps: float
    seconds: float

    def __sub__(self, other: EngineSteps) -> EngineSteps:
        return EngineSteps(self.num_steps - other.num_steps, self.seconds - other.seconds)


async def measure_latency(
    server: Server, workload: Workload, *, on_finish: Callable[[], object]
) -> Result:
    """Run single streams; on a server of ours, set them against the engine's own step time.

    The prompts' steps are taken off by sending as many requests for one token each before.
    """
    first = await read_steps(server.endpoint)
    only_prompts = await measure(server, workload.resized(outputs=1), seed=1, on_finish=on_finish)
    between = await read_steps(server.endpoint)
    result = await measure(server, workload, seed=2, on_finish=on_finish)
    last = await read_steps(server.endpoint)
    if first is None or between is None or last is None or only_prompts.skipped or result.skipped:
        return result
    decode = (last - between) - (between - first)
    if decode.num_steps <= 0 or "tpot_p50_ms" not in result.figures:
        return result
    step_ms = decode.seconds / decode.num_steps * 1e3
    tpot_ms = result.figures["tpot_p50_ms"]
    added = {"engine_step_ms": step_ms, "added_ms": tpot_ms - step_ms}
    added["added_share"] = tpot_ms / step_ms - 1
    return replace(result, figures=result.figures | added)


def run_latency(
    server: Server, workload: Workload, *, on_finish: Callable[[], object] = lambda: None
) -> Result:
    """Call `measure_latency` from where no event loop runs."""
    return asyncio.run(measure_latency(server, workload, on_finish=on_finish))


async def read_steps(endpoint: Endpoint) -> EngineSteps | None:
    """Ask a remora server for its counters; None when it is another server."""
    try:
        reply = await exchange(endpoint, "GET", "/metrics")
    except (OSError, TimeoutError):
        return None
    return parse_steps(reply.body.decode(errors="replace")) if reply.status == 200 else None


def parse_steps(text: str) -> EngineSteps | None:
    """Sum the two counters over all lines of a Prometheus text; None when either is missing."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name in (_STEPS, _SECONDS):
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return EngineSteps(sums[_STEPS], sums[_SECONDS]) if len(sums) == 2 else None


def latency_table(result: Result) -> TextTable:
    """Return where the time of a token goes; no rows for a server that doesn't tell."""
    figures = result.figures
    rows: tuple[tuple[str, ...], ...] = ()
    if "engine_step_ms" in figures:
        rows = (
            ("time per token after the first, p50", number(figures["tpot_p50_ms"]), ""),
            ("the engine's step", number(figures["engine_step_ms"]), ""),
            ("added on the way", number(figures["added_ms"]), percent(figures["added_share"])),
        )
    return TextTable(title="Where a token's time goes", header=("", "ms", "of a step"), rows=rows)


def latency_chart(result: Result) -> BarChart:
    """Draw the times of one stream."""
    names = ("ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms", "engine_step_ms")
    figures = result.figures
    bars = [Bar(label=name, value=figures[name]) for name in names if name in figures]
    return BarChart(title="One stream", unit="ms", bars=bars)
