"""Print a report in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from remora.deployments.bench.report.record import Report, TextTable
from remora.deployments.bench.report.rows import all_tables, notes


def show(report: Report, console: Console) -> None:
    """Print the tables, then the notes."""
    for table in all_tables(report):
        console.print(_as_rich(table))
    for note in notes(report):
        console.print(f"[yellow]note:[/] {escape(note)}")


def _as_rich(table: TextTable) -> Table:
    shown = Table(title=table.title, title_justify="left", title_style="bold")
    for place, name in enumerate(table.header):
        shown.add_column(name, justify="left" if place == 0 else "right")
    for row in table.rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown
