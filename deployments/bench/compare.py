"""Compare A with B in alternating runs, and report ratios with their spread.

The speed of a machine drifts over minutes. Alternating spreads the drift over both sides; the
spread of the ratios over the rounds shows how much of it remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from remora.deployments.bench.contestants import Contestant, Figures
from remora.deployments.bench.report.figures import compared, more_is_better, number
from remora.deployments.bench.report.record import Bar, BarChart, Result, TextTable
from remora.deployments.bench.stats import Ratio, median_figures, ratio_of
from remora.deployments.bench.workloads import Workload


@dataclass(slots=True)
class Rounds:
    """The figures of both sides, by round."""

    a: list[Figures] = field(default_factory=list)
    b: list[Figures] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One figure of one workload: A, B (medians) and A over B."""

    workload: str
    figure: str
    a: float
    b: float
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """The conclusion that the spread allows."""
        if self.ratio.low == self.ratio.high == 1:
            return "equal"
        if self.ratio.num_rounds < 2:
            return "unknown: one round"
        if not self.ratio.is_clear:
            return "unclear: spread exceeds difference"
        return "A better" if (self.ratio.ratio > 1) == more_is_better(self.figure) else "B better"


def run_rounds(
    a: Contestant,
    b: Contestant,
    workloads: Sequence[Workload],
    *,
    num_rounds: int,
    on_turn: Callable[[], None],
) -> Rounds:
    """Run A and B alternately. Both get the same prompts, which differ between rounds."""
    rounds = Rounds()
    for seed in range(num_rounds):
        for contestant, figures in ((a, rounds.a), (b, rounds.b)):
            figures.append(contestant.measure(workloads, seed=seed))
            on_turn()
    return rounds


def compare_rows(rounds: Rounds) -> list[ComparisonRow]:
    """Return the ratios of the figures that both sides have in every round."""
    rows = []
    for workload in rounds.a[0]:
        turns_a = [figures.get(workload, {}) for figures in rounds.a]
        turns_b = [figures.get(workload, {}) for figures in rounds.b]
        a, b = median_figures(turns_a), median_figures(turns_b)
        for name in compared(a, b):
            values_a = [turn[name] for turn in turns_a]
            values_b = [turn[name] for turn in turns_b]
            if min(*values_a, *values_b) > 0:
                ratio = ratio_of(values_a, values_b)
                rows.append(
                    ComparisonRow(workload=workload, figure=name, a=a[name], b=b[name], ratio=ratio)
                )
    return rows


def missing(rounds: Rounds, workloads: Sequence[Workload]) -> list[Result]:
    """Return the workloads that one side did not run, as skipped results."""
    skipped = []
    for workload in workloads:
        absent = [
            side
            for side, turns in (("A", rounds.a), ("B", rounds.b))
            if not all(turn.get(workload.name) for turn in turns)
        ]
        if absent:
            reason = f"no figures from {' and '.join(absent)}"
            skipped.append(Result(workload=workload.name, skipped=reason))
    return skipped


def as_table(rows: Sequence[ComparisonRow]) -> TextTable:
    """Return the table of ratios."""
    return TextTable.of(
        "A / B: ratio of medians (smallest and largest of a round)",
        rows,
        {
            "workload": lambda row: row.workload,
            "figure": lambda row: row.figure,
            "A": lambda row: number(row.a),
            "B": lambda row: number(row.b),
            "A / B": lambda row: f"{row.ratio.ratio:.2f}",
            "spread": lambda row: f"{row.ratio.low:.2f} to {row.ratio.high:.2f}",
            "better": lambda row: "more" if more_is_better(row.figure) else "less",
            "verdict": lambda row: row.verdict,
        },
    )


def as_chart(rows: Sequence[ComparisonRow]) -> BarChart:
    """Return a chart of the ratios with a reference line at 1."""
    return BarChart(
        title="A over B",
        unit="x",
        bars=[
            Bar(
                label=f"{row.workload} {row.figure}",
                value=row.ratio.ratio,
                low=row.ratio.low,
                high=row.ratio.high,
            )
            for row in rows
        ],
        reference=1.0,
    )
