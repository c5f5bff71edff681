"""Benchmarks of an engine in this process, written into a report. Imports no Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from remora.configs.machine import read_machine_facts
from remora.deployments.bench import offline, sweep
from remora.deployments.bench.machine import peak_memory
from remora.deployments.bench.report.charts import charts
from remora.deployments.bench.report.record import Report, Result
from remora.deployments.bench.session import note_bounds, progress_bar
from remora.deployments.bench.stats import Slo
from remora.deployments.bench.targets import Target
from remora.deployments.bench.workloads import Workload


def offline_suite(
    report: Report,
    target: Target,
    workloads: Sequence[Workload],
    *,
    repeats: int,
    seed: int,
    slo: Slo | None,
) -> None:
    """Measure the workloads on an engine in this process."""
    before = note_bounds(report, "before", _num_threads(target))
    engine = offline.OfflineEngine(target.config, show_progress=True)
    try:
        plan = engine.built.plan
        report.settings |= {
            "threads": str(plan.num_threads),
            "dtype": plan.dtype,
            "quantization": plan.quantization,
            "kernels": engine.built.kernels,
        }
        measured = []
        for workload in workloads:
            with progress_bar(workload.name, workload.num_requests * repeats) as advance:
                result = offline.measure(
                    engine, workload, repeats=repeats, seed=seed, slo=slo, on_finish=advance
                )
            measured.append((workload, with_memory(result, os.getpid())))
        best = before.best(note_bounds(report, "after", plan.num_threads))
        report.results += [
            offline.with_bound(result, workload, engine.work, best) for workload, result in measured
        ]
    finally:
        engine.close()
    report.plots += charts(report.results)


def sweep_suite(
    report: Report, target: Target, numbers: Sequence[int], *, inputs: int, outputs: int
) -> None:
    """Measure decode steps over their batch size."""
    note_bounds(report, "before", _num_threads(target))
    engine = offline.OfflineEngine(target.config)
    try:
        costs = {}
        for num_rows in numbers:
            workload = sweep.row_workload(num_rows, inputs=inputs, outputs=outputs)
            with progress_bar(workload.name, num_rows) as advance:
                result = sweep.measure_rows(engine, workload, on_finish=advance)
            report.results.append(result)
            costs[num_rows] = result.figures
        note_bounds(report, "after", engine.built.plan.num_threads)
    finally:
        engine.close()
    report.tables.append(sweep.as_table(costs))
    report.plots += sweep.as_plots(costs)


def _num_threads(target: Target) -> int:
    """Return the number of threads that the engine will use."""
    return target.config.engine.num_threads or read_machine_facts().num_cores


def with_memory(result: Result, pid: int | None) -> Result:
    """Return the result with the peak memory of a process and its descendants, if known."""
    peak = None if pid is None or result.skipped is not None else peak_memory(pid)
    if peak is None:
        return result
    return replace(result, figures=result.figures | peak.figures())
