"""Cost of a decode step over its batch size: the linear part, and the overhead."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from remora.deployments.bench.offline import OfflineEngine, step_figures
from remora.deployments.bench.report.figures import number, percent
from remora.deployments.bench.report.record import Plot, Points, Result, TextTable
from remora.deployments.bench.workloads import Workload
from remora.deployments.cli.terminal import Failure

Costs = Mapping[int, Mapping[str, float]]  # rows of a decode step -> its figures


def row_workload(num_rows: int, *, inputs: int, outputs: int) -> Workload:
    """Return a workload in which `num_rows` sequences decode together."""
    name = f"rows-{num_rows}"
    return Workload(name=name, num_requests=num_rows, input_tokens=inputs, output_tokens=outputs)


def measure_rows(
    engine: OfflineEngine, workload: Workload, *, on_finish: Callable[[], object]
) -> Result:
    """Warm up, run the workload and return medians of its steps with all rows.

    Raises Failure if there is no such step.
    """
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
    figures = step_figures(together)
    step_ms = figures["step_ms"]
    figures["overhead_share"] = (figures["schedule_ms"] + figures["sample_ms"]) / step_ms
    figures["decode_rows_tok_s"] = num_rows / step_ms * 1e3
    return Result(workload=workload.name, shape=workload.shape, figures=figures)


def as_table(costs: Costs) -> TextTable:
    """Return a table with one row for each batch size."""
    return TextTable.of(
        "Decode step over batch size",
        costs.items(),
        {
            "rows": lambda cost: str(cost[0]),
            "step ms": lambda cost: number(cost[1]["step_ms"]),
            "ms per row": lambda cost: number(cost[1]["step_ms"] / cost[0]),
            "tok/s": lambda cost: number(cost[1]["decode_rows_tok_s"]),
            "not forward": lambda cost: percent(cost[1]["overhead_share"]),
        },
    )


def as_plots(costs: Costs) -> list[Plot]:
    """Return plots of step time, overhead and rate over the batch size."""

    def line(name: str, scale: float = 1.0) -> Points:
        return [(float(num_rows), scale * figures[name]) for num_rows, figures in costs.items()]

    parts = {
        "step": line("step_ms"),
        "forward": line("forward_ms"),
        "sampling": line("sample_ms"),
        "scheduler": line("schedule_ms"),
    }
    return [
        Plot(title="Time of a decode step", x_label="rows", y_label="ms", lines=parts),
        Plot(
            title="Share of the step outside of the forward pass",
            x_label="rows",
            y_label="%",
            lines={"overhead": line("overhead_share", 100)},
            is_log_x=True,
        ),
        Plot(
            title="Decode rate",
            x_label="rows",
            y_label="tok/s",
            lines={"tok/s": line("decode_rows_tok_s")},
            is_log_x=True,
        ),
    ]
