"""The data of a benchmark report.

Knows nothing of tables, JSON and HTML, which other modules make from it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

from remora.deployments.bench.stats import median_figures, spread_of

T = TypeVar("T")

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, Points]
    is_log_x: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One value of a bar chart, with its range if known."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Horizontal bars. `reference` is a value to compare them with, such as 1."""

    title: str
    unit: str
    bars: list[Bar]
    reference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, title: str, items: Iterable[T], columns: Mapping[str, Callable[[T], str]]
    ) -> TextTable:
        """Return a table with a row for each item; `columns`: heading -> text of its cell."""
        rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
        return cls(title=title, header=tuple(columns), rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one workload on one target.

    shape:    size of the workload, in a few characters
    figures:  name -> number; the name ends in the unit
    spread:   name -> (smallest, largest) over repetitions, if there were several
    skipped:  reason why there are no figures
    notes:    caveats of the figures
    """

    workload: str
    shape: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of_runs(
        cls,
        workload: str,
        shape: str,
        runs: Sequence[dict[str, float]],
        notes: tuple[str, ...] = (),
    ) -> Self:
        """Return the medians of the runs' figures, and their spread if there are several runs."""
        spread = spread_of(runs) if len(runs) > 1 else {}
        figures = median_figures(runs)
        return cls(workload=workload, shape=shape, figures=figures, spread=spread, notes=notes)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(slots=True, kw_only=True)
class Report:
    """The report of one run of `remora bench`.

    machine, software:  facts by name
    bounds:             hardware bounds by time of measurement: before, after
    tables:             tables in addition to those made from `results`
    rounds:             for comparisons: side -> figures by workload, for each round
    """

    command: str
    target: str
    machine: dict[str, str]
    software: dict[str, str]
    date: str = field(default_factory=_now)
    settings: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    plots: list[Plot | BarChart] = field(default_factory=list)
    rounds: dict[str, list[dict[str, dict[str, float]]]] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain data, with the `figures` that comparisons read."""
        figures = {r.workload: r.figures for r in self.results if r.skipped is None}
        return asdict(self) | {"figures": figures}
