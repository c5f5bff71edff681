"""The last screen of a part: for each stage a summary, what is asked, and what is not as asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.gpu.rows import Row

MAX_LINES = 44


def verdict(part: str, stages: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Return at most MAX_LINES lines: what is bad comes before what is well."""
    rows = {stage: [Row(**row) for row in found] for stage, found in stages.items()}
    summaries = [_summary(stage, found) for stage, found in rows.items()]
    bad = [line for found in rows.values() for line in _lines(found, bad=True)]
    good = [line for found in rows.values() for line in _lines(found, bad=False)]
    num_lines = MAX_LINES - len(summaries) - 1
    lines = [*bad, *good]
    if len(lines) > num_lines:
        hidden = len(lines) - num_lines + 1
        lines = [*lines[: num_lines - 1], f"     ... and {hidden} more lines in the file"]
    is_well = bool(rows) and not bad
    return [f"part {part}: {'all as asked' if is_well else 'NOT all as asked'}", *summaries, *lines]


def is_well(stages: Mapping[str, Sequence[dict[str, Any]]]) -> bool:
    """Return whether there are rows, and none is bad."""
    found = [Row(**row) for rows in stages.values() for row in rows]
    return bool(found) and not any(row.is_bad for row in found)


def _summary(stage: str, rows: Sequence[Row]) -> str:
    asked = [row for row in rows if row.ok is not None]
    num_ok, num_failed = sum(bool(row.ok) for row in asked), sum(bool(row.failure) for row in rows)
    return (
        f"     {stage:30} {len(rows):4} rows, {num_ok} of {len(asked)} as asked, "
        f"{num_failed} failed"
    )


def _lines(rows: Sequence[Row], *, bad: bool) -> Iterator[str]:
    for row in rows:
        if row.is_bad is bad and (bad or row.is_headline):
            yield row.line()[:160]
