"""Cost of a decode step over its batch size: the linear part, and the overhead."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remora.deployments.bench.offline import OfflineEngine, StepTime
from remora.deployments.bench.report.figures import number, percent
from remora.deployments.bench.report.record import Plot, Result, TextTable
from remora.deployments.bench.workloads import Workload
from remora.deployments.cli.terminal import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Median duration in seconds of a decode step with `num_rows` rows, and of its parts."""

    num_rows: int
    step_s: float
    schedule_s: float
    forward_s: float
    sample_s: float

    @property
    def overhead_share(self) -> float:
        """Share of the step outside of the forward pass."""
        return (self.schedule_s + self.sample_s) / self.step_s


def row_workload(num_rows: int, *, inputs: int, outputs: int) -> Workload:
    """Return a workload in which `num_rows` sequences decode together."""
    return Workload(
        name=f"rows-{num_rows}",
        about="rows that decode together",
        num_requests=num_rows,
        input_tokens=inputs,
        output_tokens=outputs,
    )


def measure_rows(
    engine: OfflineEngine, workload: Workload, *, on_finish: Callable[[], object]
) -> RowCost:
    """Warm up, run the workload and return its cost. Raises Failure if no step had all rows."""
    if reason := engine.why_not(workload):
        raise Failure(f"{workload.name}: {reason}")
    num_rows = workload.num_requests
    engine.run(workload.resized(outputs=min(workload.output_tokens, 2)), seed=num_rows)
    run = engine.run(workload, seed=num_rows, on_finish=on_finish)
    together = [step for step in run.steps if step.is_decode and step.num_rows == num_rows]
    if not together:
        raise Failure(
            f"{num_rows} rows never decoded together: KV memory or max_running_requests is too "
            "small, or the outputs too short; try --set engine.kv_memory=2GiB or a larger --output"
        )
    return cost_of(together)


def cost_of(steps: Sequence[StepTime]) -> RowCost:
    """Return the medians of steps of one size."""
    return RowCost(
        num_rows=steps[0].num_rows,
        step_s=statistics.median(step.total_s for step in steps),
        schedule_s=statistics.median(step.schedule_s for step in steps),
        forward_s=statistics.median(step.forward_s for step in steps),
        sample_s=statistics.median(step.sample_s for step in steps),
    )


def as_result(cost: RowCost, workload: Workload) -> Result:
    """Return the cost as figures."""
    figures = {
        "step_ms": cost.step_s * 1e3,
        "schedule_ms": cost.schedule_s * 1e3,
        "forward_ms": cost.forward_s * 1e3,
        "sample_ms": cost.sample_s * 1e3,
        "overhead_share": cost.overhead_share,
        "decode_rows_tok_s": cost.num_rows / cost.step_s,
    }
    return Result(workload=workload.name, shape=workload.shape, figures=figures)


def as_table(costs: Sequence[RowCost]) -> TextTable:
    """Return a table with one row for each batch size."""
    rows = [
        (
            str(cost.num_rows),
            number(cost.step_s * 1e3),
            number(cost.step_s / cost.num_rows * 1e3),
            number(cost.num_rows / cost.step_s),
            percent(cost.overhead_share),
        )
        for cost in costs
    ]
    return TextTable(
        title="Decode step over batch size",
        header=("rows", "step ms", "ms per row", "tok/s", "not forward"),
        rows=tuple(rows),
    )


def as_plots(costs: Sequence[RowCost]) -> list[Plot]:
    """Return plots of step time, overhead and rate over the batch size."""

    def line(value: Callable[[RowCost], float]) -> list[tuple[float, float]]:
        return [(float(cost.num_rows), value(cost)) for cost in costs]

    parts = {
        "step": line(lambda cost: cost.step_s * 1e3),
        "forward": line(lambda cost: cost.forward_s * 1e3),
        "sampling": line(lambda cost: cost.sample_s * 1e3),
        "scheduler": line(lambda cost: cost.schedule_s * 1e3),
    }
    return [
        Plot(title="Time of a decode step", x_label="rows", y_label="ms", lines=parts),
        Plot(
            title="Share of the step outside of the forward pass",
            x_label="rows",
            y_label="%",
            lines={"overhead": line(lambda cost: cost.overhead_share * 100)},
            is_log_x=True,
        ),
        Plot(
            title="Decode rate",
            x_label="rows",
            y_label="tok/s",
            lines={"tok/s": line(lambda cost: cost.num_rows / cost.step_s)},
            is_log_x=True,
        ),
    ]
