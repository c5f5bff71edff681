"""Whether a GPU would wait for the host: the real engine's thread and a simulated device.

    python tests/benchmarks/host/device_gap.py [--model NAME] [--rows N ...] [OPTIONS]

For each model and number of rows, prints the device's step, the host's work per step and the share
of time for which the device is idle ("gap"): of the best window of 32 steps, and of the median one.
tests/engine/simulated/ describes the device. With `--served`, waits are real, and a client's event
loop takes the outputs in another thread of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # run as a script, not by pytest

from tests.benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B
from tests.engine.simulated.decoding import DRAWN, GREEDY, Simulation, median, windows
from tests.engine.simulated.device import SleepingClock

MODELS = {"llama-3.1-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B}
ROWS = (1, 8, 32, 64, 128, 256)
WINDOW, NUM_WINDOWS = 32, 10


def measure(name: str, num_rows: int, *, greedy: bool, served: bool) -> None:
    simulation = Simulation.of(MODELS[name], num_rows, SleepingClock() if served else None)
    sampling, num_steps = GREEDY if greedy else DRAWN, WINDOW * NUM_WINDOWS + 1
    if served:
        marks = asyncio.run(simulation.serve(num_rows, num_steps, **sampling))
    else:
        marks = simulation.decode(num_rows, num_steps, **sampling)
    found = windows(marks, WINDOW)
    best = min(found, key=lambda window: window.gap)
    step_s = simulation.device.roofline.step_s(num_rows, num_rows)
    sys.stdout.write(
        f"{name:14} {num_rows:4} rows: device {step_s * 1e3:6.2f} ms, host best "
        f"{min(window.host_s for window in found) * 1e3:5.2f} median "
        f"{median(found, lambda window: window.host_s) * 1e3:5.2f} ms, gap best {best.gap:6.1%} "
        f"median {median(found, lambda window: window.gap):6.1%}, "
        f"{best.num_uploads:.1f} uploads\n"
    )
    sys.stdout.flush()


def profile(name: str, num_rows: int) -> None:
    """Print where the engine's time goes, stepping it in this thread."""
    simulation = Simulation.of(MODELS[name], num_rows)
    simulation.add_requests(num_rows, 900, **DRAWN)
    profiler = cProfile.Profile()
    with simulation.device.choosing():
        while len(simulation.device.marks) < 10:
            simulation.engine.step()
        profiler.enable()
        for _ in range(200):
            simulation.engine.step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for model in options.model or MODELS:
        for rows in options.rows:
            if options.profile:
                profile(model, rows)
            else:
                measure(model, rows, greedy=options.greedy, served=options.served)
