"""Offline throughput of the engine, and profiles of its decode steps and prompts.

Prompts of random tokens are asked all at once. Decode steps are profiled inside of the engine, so
that the idle share is that of serving; prompts are profiled as single steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from remora.engine.types import Request, SamplingParams
from tests.benchmarks.gpu.built import Built, answer, build, launched, step_inputs
from tests.benchmarks.gpu.case import Case, Once
from tests.benchmarks.gpu.compiles import COMPILES
from tests.benchmarks.gpu.loads import LOADS, TINY_LOADS, Load
from tests.benchmarks.gpu.rows import TOKENS_PER_S, Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.shapes import config_of
from tests.benchmarks.gpu.traces import Trace, trace

DECODES, TINY_DECODES = (64, 1, 256), (2,)
PROMPTS, TINY_PROMPTS = (512, 128, 8192), (32,)
CONTEXT, TINY_CONTEXT = 1024, 32
PROFILED_STEPS = 20
CASE_S = 110.0
SHOWN = 12  # kernels, in a row's details; the table in the tar has all


def cases(setting: Setting) -> Iterator[Case]:
    name, config = config_of(setting.options["model"], tiny=setting.is_tiny)
    built = Once(lambda: build(config, tiny=setting.is_tiny))
    for load in TINY_LOADS if setting.is_tiny else LOADS:
        about = Row(model=name, what=f"offline, {load.name}", is_headline=True)
        yield Case(about, partial(offline, about, built, load), CASE_S)
    for rows in TINY_DECODES if setting.is_tiny else DECODES:
        about = Row(model=name, what=f"profile of decode at {rows} rows")
        yield Case(about, partial(decode, about, built, rows, setting), CASE_S)
    for num_tokens in TINY_PROMPTS if setting.is_tiny else PROMPTS:
        about = Row(model=name, what=f"profile of prefill {num_tokens}")
        yield Case(about, partial(prefill, about, built, num_tokens, setting), CASE_S)


def offline(about: Row, built: Callable[[], Built], load: Load) -> Iterator[Row]:
    """Answer a load, after a few short prompts."""
    made = built()
    engine, numbers = made.engine(), np.random.default_rng(2)

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [numbers.integers(0, 500, length).tolist() for length in lengths]

    answer(engine, "warm", prompts([16] * 4), [4] * 4)
    num_kernels = COMPILES.num_kernels
    run = answer(engine, about.what, prompts(load.prompts), load.answers)
    details = {
        "seconds": run.seconds,
        "prompt_tokens": sum(load.prompts),
        "output_tokens": run.num_tokens,
        "steps": len(run.step_s),
        "step_ms": statistics.median(run.step_s) * 1e3,
        "longest_step_ms": max(run.step_s) * 1e3,
    }
    yield about.found(run.num_tokens / run.seconds, TOKENS_PER_S, details=details)
    met = Row(model=about.model, what=f"kernels met by {about.what}")
    yield met.found(COMPILES.num_kernels - num_kernels, "kernels").asking_at_most(0)


def decode(about: Row, built: Callable[[], Built], rows: int, setting: Setting) -> Iterator[Row]:
    """Profile steps of the engine in which all rows decode."""
    engine = built().engine()
    context = TINY_CONTEXT if setting.is_tiny else CONTEXT
    params = SamplingParams(max_tokens=2 * PROFILED_STEPS, temperature=0.0, ignore_eos=True)
    numbers = np.random.default_rng(4)
    for row in range(rows):
        ids = numbers.integers(0, 500, context).tolist()
        engine.add(Request(request_id=f"{row}", prompt_ids=ids, sampling=params))
    while len(engine.step()) < rows:  # until all prompts are done
        pass

    def run() -> None:
        for _ in range(PROFILED_STEPS):
            engine.step()

    yield from report(about, trace(run, setting.torch_device), PROFILED_STEPS, setting)
    while engine.has_work:
        engine.step()


def prefill(
    about: Row, built: Callable[[], Built], num_tokens: int, setting: Setting
) -> Iterator[Row]:
    """Profile a prompt that is computed in one step, several times."""
    made, times = built(), 4
    steps = [step_inputs(1, 0, num_tokens, grown=True)]
    launched(made, steps)

    def run() -> None:
        for _ in range(times):
            launched(made, steps)

    yield from report(about, trace(run, setting.torch_device), times, setting)


def report(about: Row, found: Trace, steps: int, setting: Setting) -> Iterator[Row]:
    """Write the table of a profile, and yield a step's time and the idle share."""
    found.write(Path(setting.work, f"{about.model} {about.what}.csv".replace(" ", "-")))
    longest = {name[:80]: us / found.span_us for name, _, us in found.kernels[:SHOWN]}
    yield about.found(found.span_us / steps / 1e3, "ms/step", details=longest)
    idle = Row(model=about.model, what=f"{about.what}: idle", is_headline=True)
    yield idle.found(100 * found.idle_share, "%")
