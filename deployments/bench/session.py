"""Parts of all benchmarks: begin a report, measure bounds, show and write the report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from remora.deployments.bench.machine import (
    busy_warning,
    describe_machine,
    describe_software,
    forget_peak_memory,
)
from remora.deployments.bench.report.html import render_html
from remora.deployments.bench.report.record import Report
from remora.deployments.bench.report.table import show
from remora.deployments.bench.roofline import Bounds
from remora.deployments.cli.terminal import Failure, answer

STDOUT = "-"
MIN_COLUMNS = 120  # width of tables in a file or pipe, where rich assumes 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where a report is written in addition to the terminal.

    json:  a file, or "-" for stdout; the tables are then printed to stderr
    """

    json: str | None = None
    html: Path | None = None

    def check(self) -> None:
        """Raise Failure if a file could not be written at the end."""
        for path in (self.json, self.html):
            is_file = path is not None and str(path) != STDOUT
            if is_file and not Path(str(path)).absolute().parent.is_dir():
                raise Failure(f"{path}: its folder does not exist")


def begin(target: str, **settings: object) -> Report:
    """Return a new report, and warn if the machine is busy."""
    report = Report(
        command=shlex.join(["remora", *sys.argv[1:]]),
        target=target,
        machine=describe_machine(),
        software=describe_software(),
        settings={name: str(value) for name, value in settings.items() if value is not None},
    )
    warn(report, busy_warning())
    return report


def warn(report: Report, warning: str | None) -> None:
    """Add a warning, if there is one, to the report and print it."""
    if warning is None:
        return
    report.warnings.append(warning)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[yellow]warning:[/] {warning}")


def note_bounds(report: Report, moment: str, num_threads: int) -> Bounds:
    """Measure the machine's bounds and add them to the report."""
    from remora.deployments.bench.bounds import measure_bounds

    bounds = measure_bounds(num_threads)
    forget_peak_memory()
    report.bounds[moment] = asdict(bounds)
    return bounds


def finish(report: Report, outputs: Outputs) -> None:
    """Show the report and write its files. Raises Failure if every workload was skipped."""
    data = orjson.dumps(report.as_data(), option=orjson.OPT_INDENT_2).decode()
    is_piped = outputs.json == STDOUT
    console = Console(stderr=is_piped, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_COLUMNS)
    show(report, console)
    if is_piped:
        answer(data)
    elif outputs.json is not None:
        _write(Path(outputs.json), data + "\n")
    if outputs.html is not None:
        _write(outputs.html, render_html(report))
    skipped = [result.skipped for result in report.results if result.skipped is not None]
    is_empty = not any(table.rows for table in report.tables)
    if is_empty and skipped and len(skipped) == len(report.results):
        raise Failure(f"nothing was measured: {skipped[0]}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; yield a function that advances it by one."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=2,  # drawing takes time on the measured processors
    ) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)
