"""What a benchmark leaves behind: one report, as data.

Tables, JSON and HTML are made from it; it knows none of them.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """One value of a bar chart, with the range that it was seen in where known."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Values beside each other. `reference` is a value to hold them against, such as 1."""

    title: str
    unit: str
    bars: list[Bar]
    reference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table as it is shown: the first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one workload gave on one target.

    shape:    its size, in a few characters
    figures:  name -> number; the name ends in the unit
    spread:   name -> (smallest, largest) over repetitions, where there were several
    skipped:  why there are no figures
    notes:    what a reader should know before believing the figures
    """

    workload: str
    shape: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: str | None = None
    notes: tuple[str, ...] = ()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(slots=True, kw_only=True)
class Report:
    """One run of the tool.

    machine, software:  facts by name
    bounds:             what the machine could do, by name of the moment: before, after
    tables:             further tables, besides those made of `results`
    rounds:             of a comparison: side -> workload -> figures of each round
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
        """Return the report as plain data; `figures` is what comparisons read."""
        figures = {r.workload: r.figures for r in self.results if r.skipped is None}
        return asdict(self) | {"figures": figures}
