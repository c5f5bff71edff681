"""Latency of single streams: the engine's time per token, and what the server adds to it."""

from __future__ import annotations

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
    """Number of steps that an engine has run since its start, and their duration in seconds."""

    num_steps: float
    seconds: float

    def __sub__(self, other: EngineSteps) -> EngineSteps:
        return EngineSteps(self.num_steps - other.num_steps, self.seconds - other.seconds)


async def measure_latency(
    server: Server, workload: Workload, *, on_finish: Callable[[], object]
) -> Result:
    """Run single streams; on a remora server, compare them with the engine's step time.

    Requests for one token each are sent first, to subtract the steps of the prompts.
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


async def read_steps(endpoint: Endpoint) -> EngineSteps | None:
    """Return the step counters of a remora server; None for another server."""
    try:
        reply = await exchange(endpoint, "GET", "/metrics")
    except (OSError, TimeoutError):
        return None
    return parse_steps(reply.body.decode(errors="replace")) if reply.status == 200 else None


def parse_steps(text: str) -> EngineSteps | None:
    """Sum both counters over all lines of a Prometheus text; None if either is missing."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name in (_STEPS, _SECONDS):
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return EngineSteps(sums[_STEPS], sums[_SECONDS]) if len(sums) == 2 else None


def latency_table(result: Result) -> TextTable:
    """Return the parts of the time per token; no rows for a server without step counters."""
    figures = result.figures
    rows: tuple[tuple[str, ...], ...] = ()
    if "engine_step_ms" in figures:
        rows = (
            ("time per token after the first, p50", number(figures["tpot_p50_ms"]), ""),
            ("engine step", number(figures["engine_step_ms"]), ""),
            ("added by the server", number(figures["added_ms"]), percent(figures["added_share"])),
        )
    return TextTable(title="Time per token", header=("", "ms", "of a step"), rows=rows)


def latency_chart(result: Result) -> BarChart:
    """Return a chart of the latencies of one stream."""
    names = ("ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms", "engine_step_ms")
    figures = result.figures
    bars = [Bar(label=name, value=figures[name]) for name in names if name in figures]
    return BarChart(title="One stream", unit="ms", bars=bars)
