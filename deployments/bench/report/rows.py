"""The tables of a report as text, for the terminal and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from remora.deployments.bench.report.figures import headline, joined, number, percent, triple
from remora.deployments.bench.report.record import Report, Result, TextTable

Columns = Mapping[str, Callable[[Result], str]]

_MOST_POSITIONS = 8  # of drafts in a table
_UNITS = {
    "decode_tok_s": "decode tok/s",
    "prefill_tok_s": "prompt tok/s",
    "output_tok_s": "output tok/s",
    "total_tok_s": "input tok/s",
}


def all_tables(report: Report) -> list[TextTable]:
    """Return all tables that have rows: results first, hardware bounds last."""
    done = [result for result in report.results if result.skipped is None]
    skipped = [result for result in report.results if result.skipped is not None]
    tables = [
        TextTable.of("Throughput", (r for r in done if headline(r.figures)), _RATES),
        TextTable.of(
            "Latency in ms: p50 / p90 / p99",
            (r for r in done if "ttft_p50_ms" in r.figures),
            _LATENCIES,
        ),
        TextTable.of(
            "A decode step (median), in ms", (r for r in done if "step_ms" in r.figures), _STEPS
        ),
        TextTable.of("Drafts", (r for r in done if "draft_rows" in r.figures), _DRAFTS),
        *report.tables,
        _bounds(report),
        TextTable.of("Skipped", skipped, _SKIPPED),
    ]
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


def _speed(result: Result) -> str:
    name = headline(result.figures) or ""
    return f"{number(result.figures[name])} {_UNITS[name]}"


def _by_position(result: Result) -> str:
    """Return acceptance of the first, second, ... drafts whose predecessors were right."""
    names = [f"accepted_{place}_share" for place in range(1, _MOST_POSITIONS + 1)]
    found = [result.figures[name] for name in names if name in result.figures]
    return " / ".join(f"{share * 100:.0f}" for share in found) + " %"


def _seconds(result: Result, name: str) -> str:
    """Return a time, and its share of the run."""
    value = result.figures[name]
    return f"{number(value)} s ({percent(value / result.figures['seconds'])})"


def _range(result: Result) -> str:
    name = headline(result.figures) or ""
    low, high = result.spread.get(name, (result.figures[name],) * 2)
    return f"{number(low)} to {number(high)}" if result.spread else "-"


_RATES: Columns = {
    "workload": lambda result: result.workload,
    "size": lambda result: result.shape,
    "speed": _speed,
    "range": _range,
    "output/s": lambda result: number(result.figures.get("output_tok_s")),
    "total/s": lambda result: number(result.figures.get("total_tok_s")),
    "of bound": lambda result: percent(result.figures.get("bound_share")),
    "peak MiB": lambda result: number(result.figures.get("peak_rss_mib")),
    "failed": lambda result: f"{result.figures.get('failures', 0):.0f}",
}
_LATENCIES: Columns = {
    "workload": lambda result: result.workload,
    "first token": lambda result: triple(result.figures, "ttft"),
    "per further token": lambda result: triple(result.figures, "tpot"),
    "between pieces": lambda result: triple(result.figures, "itl"),
    "in SLO": lambda result: percent(result.figures.get("goodput_share")),
    "req/s": lambda result: number(result.figures.get("goodput_req_s")),
}
_PARTS = ("schedule_ms", "forward_ms", "sample_ms")
_STEPS: Columns = {
    "workload": lambda result: result.workload,
    "step": lambda result: number(result.figures["step_ms"]),
    "scheduler / forward / sampling": lambda result: joined(map(result.figures.get, _PARTS)),
    "not forward": lambda result: percent(result.figures["overhead_share"]),
}
_DRAFTS: Columns = {
    "workload": lambda result: result.workload,
    "tokens per verified row": lambda result: number(result.figures["tokens_per_verified_row"]),
    "accepted": lambda result: percent(result.figures["accepted_share"]),
    "by position": _by_position,
    "verify steps": lambda result: number(result.figures["verify_steps"]),
    "drafting": lambda result: _seconds(result, "drafting_s"),
    "verifying": lambda result: _seconds(result, "verifying_s"),
}
_SKIPPED: Columns = {
    "workload": lambda result: result.workload,
    "reason": lambda result: result.skipped or "",
}


def _bounds(report: Report) -> TextTable:
    threads = next((values["num_threads"] for values in report.bounds.values()), None)
    read = f"GB/s read by 1 / {threads or 0:.0f} threads"
    return TextTable.of(
        "Hardware bounds in this run",
        report.bounds.items(),
        {
            "measured": lambda row: row[0],
            read: lambda row: joined([row[1]["read_gb_s_1"], row[1]["read_gb_s"]]),
            "GFLOP/s bf16": lambda row: number(row[1]["bf16_gflop_s"]),
            "GOP/s int8": lambda row: number(row[1]["int8_gop_s"]),
        },
    )
