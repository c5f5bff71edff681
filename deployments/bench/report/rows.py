"""The tables of a report as text, for the terminal and HTML."""

from __future__ import annotations

from collections.abc import Sequence

from remora.deployments.bench.report.figures import headline, joined, number, percent, triple
from remora.deployments.bench.report.record import Report, Result, TextTable

_UNITS = {
    "decode_tok_s": "decode tok/s",
    "prefill_tok_s": "prompt tok/s",
    "output_tok_s": "output tok/s",
    "total_tok_s": "input tok/s",
}


def all_tables(report: Report) -> list[TextTable]:
    """Return all tables that have rows: results first, hardware bounds last."""
    done = [result for result in report.results if result.skipped is None]
    tables = [_rates(done), _latencies(done), _steps(done), *report.tables, _bounds(report)]
    skipped = [(r.workload, r.skipped) for r in report.results if r.skipped is not None]
    tables.append(TextTable(title="Skipped", header=("workload", "reason"), rows=tuple(skipped)))
    return [table for table in tables if table.rows]


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the circumstances of the run by name."""
    return [
        ("command", report.command),
        ("target", report.target),
        ("date", report.date),
        *report.settings.items(),
        *report.machine.items(),
        *report.software.items(),
    ]


def notes(report: Report) -> list[str]:
    """Return the warnings, and the notes of each workload."""
    return [
        *report.warnings,
        *(f"{result.workload}: {note}" for result in report.results for note in result.notes),
    ]


def _rates(results: Sequence[Result]) -> TextTable:
    rows = []
    for result in results:
        figures = result.figures
        name = headline(figures)
        if name is None:
            continue
        low, high = result.spread.get(name, (figures[name], figures[name]))
        rows.append(
            (
                result.workload,
                result.shape,
                f"{number(figures[name])} {_UNITS[name]}",
                f"{number(low)} to {number(high)}" if result.spread else "-",
                number(figures.get("output_tok_s")),
                number(figures.get("total_tok_s")),
                percent(figures.get("bound_share")),
                number(figures.get("peak_rss_mib")),
                f"{figures.get('failures', 0):.0f}",
            )
        )
    return TextTable(
        title="Throughput",
        header=(
            "workload",
            "size",
            "speed",
            "range",
            "output/s",
            "total/s",
            "of bound",
            "peak MiB",
            "failed",
        ),
        rows=tuple(rows),
    )


def _latencies(results: Sequence[Result]) -> TextTable:
    rows = [
        (
            result.workload,
            triple(result.figures, "ttft"),
            triple(result.figures, "tpot"),
            triple(result.figures, "itl"),
            percent(result.figures.get("goodput_share")),
            number(result.figures.get("goodput_req_s")),
        )
        for result in results
        if "ttft_p50_ms" in result.figures
    ]
    return TextTable(
        title="Latency in ms: p50 / p90 / p99",
        header=(
            "workload",
            "first token",
            "per further token",
            "between pieces",
            "in SLO",
            "req/s",
        ),
        rows=tuple(rows),
    )


def _steps(results: Sequence[Result]) -> TextTable:
    rows = [
        (
            result.workload,
            number(figures["step_ms"]),
            joined([figures[f"{part}_ms"] for part in ("schedule", "forward", "sample")]),
            percent(figures["overhead_share"]),
        )
        for result in results
        if "step_ms" in (figures := result.figures)
    ]
    return TextTable(
        title="A decode step (median), in ms",
        header=("workload", "step", "scheduler / forward / sampling", "not forward"),
        rows=tuple(rows),
    )


def _bounds(report: Report) -> TextTable:
    rows = [
        (
            moment,
            joined([values["read_gb_s_1"], values["read_gb_s"]]),
            number(values["bf16_gflop_s"]),
            number(values["int8_gop_s"]),
        )
        for moment, values in report.bounds.items()
    ]
    threads = next((values["num_threads"] for values in report.bounds.values()), None)
    return TextTable(
        title="Hardware bounds in this run",
        header=(
            "measured",
            f"GB/s read by 1 / {threads or 0:.0f} threads",
            "GFLOP/s bf16",
            "GOP/s int8",
        ),
        rows=tuple(rows),
    )
