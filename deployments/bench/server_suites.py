"""Benchmarks of servers, starts and pairs of contestants, written into a report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from remora.configs.machine import read_machine_facts
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import make_plan
from remora.deployments.bench import compare, online
from remora.deployments.bench.contestants import Contestant, machine_warning
from remora.deployments.bench.http_client import Endpoint, parse_url
from remora.deployments.bench.latency import latency_chart, latency_table, measure_latency
from remora.deployments.bench.machine import listener_pid
from remora.deployments.bench.offline import with_bound, work_of_plan
from remora.deployments.bench.report.charts import charts
from remora.deployments.bench.report.record import Report
from remora.deployments.bench.roofline import ModelWork
from remora.deployments.bench.server_process import running_server
from remora.deployments.bench.session import note_bounds, progress_bar, warn
from remora.deployments.bench.startup import measure_start, start_offline, start_server
from remora.deployments.bench.stats import Slo
from remora.deployments.bench.suites import with_memory
from remora.deployments.bench.targets import Target
from remora.deployments.bench.workloads import Workload
from remora.engine.models.facts import read_model_facts
from remora.engine.models.locate import locate_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running server. `pid` is its process, if it runs on this machine."""

    endpoint: Endpoint
    pid: int | None


@contextmanager
def some_server(url: str | None, target: Target | None, api_key: str | None) -> Iterator[Running]:
    """Yield the server at `url`, or start one that serves `target` within the block."""
    if url is not None:
        endpoint = parse_url(url, api_key)
        pid = listener_pid(endpoint.port) if endpoint.is_local else None
        yield Running(endpoint=endpoint, pid=pid)
        return
    if target is None:
        raise ValueError("neither a URL nor a target")
    status = Console(stderr=True).status("starting the server")
    with status, running_server(target) as server:
        status.stop()
        yield Running(endpoint=parse_url(server.url), pid=server.pid)


def online_suite(
    report: Report,
    running: Running,
    workloads: Sequence[Workload],
    *,
    model: str | None,
    repeats: int,
    seed: int,
    slo: Slo | None,
    target: Target | None,
) -> None:
    """Measure the workloads on a server, and this machine's bounds if the server runs on it.

    target:  the configuration served, if known; figures are then compared with the bounds
    """
    server = asyncio.run(online.Server.open(running.endpoint, model))
    report.settings["model"] = server.model
    num_threads = read_machine_facts().num_cores
    is_local = running.endpoint.is_local
    before = note_bounds(report, "before", num_threads) if is_local else None
    work = None if before is None or target is None else work_of(target)
    measured = []
    for workload in workloads:
        with progress_bar(workload.name, workload.num_requests * repeats) as advance:
            result = asyncio.run(
                online.measure(
                    server, workload, repeats=repeats, seed=seed, slo=slo, on_finish=advance
                )
            )
        measured.append((workload, with_memory(result, running.pid)))
    if before is not None:
        best = before.best(note_bounds(report, "after", num_threads))
        if work is not None:
            measured = [(w, with_bound(result, w, work, best)) for w, result in measured]
    report.results += [result for _, result in measured]
    report.plots += charts(report.results)


def latency_suite(
    report: Report, running: Running, workload: Workload, *, model: str | None
) -> None:
    """Measure the latency of single streams."""
    server = asyncio.run(online.Server.open(running.endpoint, model))
    report.settings["model"] = server.model
    with progress_bar(workload.name, 2 * workload.num_requests) as advance:
        result = asyncio.run(measure_latency(server, workload, on_finish=advance))
    report.results.append(with_memory(result, running.pid))
    report.tables += [latency_table(result)]
    report.plots += [latency_chart(result)]


def startup_suite(report: Report, target: Target, *, only: str | None, repeats: int) -> None:
    """Measure starts, offline first, so that both find the model's file in the page cache."""
    starts = {"offline": start_offline, "serve": start_server}
    for name, start in starts.items():
        if only in (None, name):
            with progress_bar(f"start, {name}", repeats) as advance:
                result, table = measure_start(name, partial(start, target), repeats, advance)
            report.results.append(result)
            report.tables.append(table)


def compare_suite(
    report: Report, a: Contestant, b: Contestant, workloads: Sequence[Workload], *, num_rounds: int
) -> None:
    """Compare two contestants in alternating runs."""
    warn(report, machine_warning(a, b))
    with progress_bar("turns", 2 * num_rounds) as advance:
        rounds = compare.run_rounds(a, b, workloads, num_rounds=num_rounds, on_turn=advance)
    rows = compare.compare_rows(rounds)
    report.tables.append(compare.as_table(rows))
    report.plots.append(compare.as_chart(rows))
    report.results += compare.missing(rounds, workloads)
    report.rounds = {"A": rounds.a, "B": rounds.b}


def work_of(target: Target) -> ModelWork:
    """Return the work per token of the target's model, without loading it."""
    path = locate_model(target.config.model)
    plan = make_plan(
        target.config,
        read_model_facts(path, Loading.of(target.config.model)),
        read_machine_facts(),
        path,
    )
    return work_of_plan(plan)
