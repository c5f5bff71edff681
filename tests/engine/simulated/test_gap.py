"""A simulated GPU does not wait for the engine's thread.

What is timed is slow-marked and takes the best of several windows. Otherwise work of the host is
counted in calls of functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from remora.engine.runner.runner import LocalRunner
from remora.engine.scheduler.scheduler import Scheduler
from remora.engine.types import StepPlan
from tests.benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B
from tests.engine.simulated.decoding import DRAWN, GREEDY, Simulation, Window, windows
from tests.engine.simulated.roofline import Roofline

WINDOW = 16
MAX_GAP = 0.05
MAX_CALLS_PER_ROW, MAX_CALLS_PER_STEP = 20, 580


def best_window(simulation: Simulation, num_rows: int, num_windows: int) -> Window:
    marks = simulation.decode(num_rows, WINDOW * num_windows + 1, **DRAWN)
    return min(windows(marks, WINDOW), key=lambda window: window.gap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "num_rows"),
    [
        *(pytest.param(LLAMA_8B, rows, id=f"llama-8b {rows}") for rows in (1, 8, 32, 64, 128, 256)),
        *(pytest.param(QWEN3_06B, rows, id=f"qwen3-0.6b {rows}") for rows in (32, 64, 128, 256)),
    ],
)
def test_the_device_never_waits(shape: dict[str, Any], num_rows: int) -> None:
    best = best_window(Simulation.of(shape, num_rows), num_rows, 12)

    assert best.gap <= MAX_GAP
    assert best.step_s == pytest.approx(
        Roofline.of(shape).step_s(num_rows, num_rows), rel=MAX_GAP + 0.1
    )


def sleep_in_scheduler(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def slow(scheduler: Scheduler, *, admitting: bool = True) -> StepPlan | None:
        time.sleep(1e-3)
        return schedule(scheduler, admitting=admitting)

    monkeypatch.setattr(Scheduler, "schedule", slow)


def wait_for_each_step(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LocalRunner.begin

    def waiting(runner: LocalRunner, plan: StepPlan) -> None:
        begin(runner, plan)
        simulation.device.synchronize()

    monkeypatch.setattr(LocalRunner, "begin", waiting)


@pytest.mark.parametrize("harm", [sleep_in_scheduler, wait_for_each_step])
def test_a_gap_is_found(
    harm: Callable[[Simulation, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 0.9 ms have no room for 1 ms more, nor for a host that works after each of them."""
    simulation = Simulation.of(QWEN3_06B, 8)
    harm(simulation, monkeypatch)

    assert best_window(simulation, 8, 4).gap > MAX_GAP


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_step_uploads_once_and_waits_once(sampling: dict[str, Any]) -> None:
    marks = Simulation.of(LLAMA_8B, 8).decode(8, 40, **sampling)

    first, last = marks[0], marks[-1]

    assert last.num_uploads - first.num_uploads == len(marks) - 1
    assert last.num_waits - first.num_waits <= len(marks) - 1


@pytest.mark.parametrize(("sampling", "num_launches"), [({}, 3), ({"presence_penalty": 0.5}, 8)])
def test_a_step_of_plain_rows_is_an_upload_a_graph_and_a_copy(
    sampling: dict[str, Any], num_launches: int
) -> None:
    """A penalty is one kernel on a GPU, which the simulated device does not count."""
    simulation = Simulation.of(QWEN3_06B, 8)
    simulation.add_requests(8, 100, **DRAWN, **sampling)
    with simulation.device.choosing():
        while len(simulation.device.marks) < 3:
            simulation.engine.step()
        before = simulation.device.num_launches
        for _ in range(20):
            simulation.engine.step()

    assert simulation.device.num_launches - before == 20 * num_launches


def launches_per_step(*, captures_prompts: bool) -> float:
    simulation = Simulation.of(QWEN3_06B, 8, chunk_tokens=64, captures_prompts=captures_prompts)
    return simulation.extend(8, 40, **GREEDY).num_launches


def test_a_captured_step_with_prompts_is_few_launches() -> None:
    """Upload, graph, logits, sampling, and the copies of tokens to the host."""
    num_kernels = Roofline.of(QWEN3_06B).num_nodes

    assert launches_per_step(captures_prompts=True) < 20
    assert launches_per_step(captures_prompts=False) > num_kernels


def calls_per_step(num_rows: int, num_steps: int = 32) -> float:
    """Return the calls of Python and C functions in a step of decoding."""
    simulation = Simulation.of(QWEN3_06B, num_rows)
    simulation.add_requests(num_rows, 200, **DRAWN)
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    with simulation.device.choosing():
        while not simulation.device.marks:
            simulation.engine.step()
        sys.setprofile(count)
        try:
            for _ in range(num_steps):
                simulation.engine.step()
                simulation.engine.stats()
        finally:
            sys.setprofile(None)
    return num_calls / num_steps


def test_the_hosts_work_is_bounded_per_row_and_step() -> None:
    few, many = calls_per_step(4), calls_per_step(68)

    assert (many - few) / 64 <= MAX_CALLS_PER_ROW
    assert few <= MAX_CALLS_PER_STEP
