"""Charts of results."""

from __future__ import annotations

from collections.abc import Sequence

from remora.deployments.bench.report.figures import headline
from remora.deployments.bench.report.record import Bar, BarChart, Plot, Result


def charts(results: Sequence[Result]) -> list[Plot | BarChart]:
    """Return the charts of all results that have the needed figures."""
    done = [result for result in results if result.skipped is None]
    plots: list[Plot | BarChart] = [
        _bars("Speed", "tok/s", [(r.workload, r, headline(r.figures)) for r in done]),
        _bars(
            "Share of the machine's bound",
            "",
            [(r.workload, r, "bound_share") for r in done],
            reference=1.0,
        ),
        *concurrency_plots(done),
    ]
    return [plot for plot in plots if not isinstance(plot, BarChart) or plot.bars]


def _bars(
    title: str,
    unit: str,
    found: Sequence[tuple[str, Result, str | None]],
    *,
    reference: float | None = None,
) -> BarChart:
    bars = []
    for label, result, name in found:
        if name is None or name not in result.figures:
            continue
        low, high = result.spread.get(name, (None, None))
        bars.append(Bar(label=label, value=result.figures[name], low=low, high=high))
    return BarChart(title=title, unit=unit, bars=bars, reference=reference)


def concurrency_plots(results: Sequence[Result]) -> list[Plot]:
    """Return plots of rates and times over the number of streams, if there are several."""
    streams = {
        int(result.workload.removeprefix("online-")): result.figures
        for result in results
        if result.workload.startswith("online-")
    }
    if len(streams) < 2:
        return []
    groups = {
        "Output rate": ("tok/s", ("output_tok_s", "total_tok_s")),
        "Time to first token": ("ms", ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms")),
        "Time per token after": ("ms", ("tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms")),
        "Within the SLO": ("share of requests", ("goodput_share",)),
    }
    plots = []
    for title, (unit, names) in groups.items():
        lines = {
            name: [(float(n), streams[n][name]) for n in sorted(streams) if name in streams[n]]
            for name in names
        }
        if any(lines.values()):
            plots.append(
                Plot(
                    title=title,
                    x_label="concurrent streams",
                    y_label=unit,
                    lines={name: line for name, line in lines.items() if line},
                    is_log_x=True,
                )
            )
    return plots
