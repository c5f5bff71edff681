"""Compare our autoscaling policy with plain request counts on load curves: surplus and lack.

    python tests/benchmarks/autoscaling_sim.py [folder for plots]

A simulation with a virtual clock (its model: tests/deployments/autoscaling/): figures
are exact and the same on every machine. Prints a table; writes one SVG per curve.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, not by pytest

from remora.deployments.autoscaling import explain
from remora.deployments.bench.report.record import Plot
from remora.deployments.bench.report.svg import line_plot
from tests.deployments.autoscaling.simulation import (
    Curve,
    PlainRequests,
    Policy,
    Run,
    Simulation,
    capacity,
    slo_policy,
)

SECONDS, POINTS_S = 1800, 10
COLOURS = "--c0:#3366cc;--c1:#dc7633;--c2:#229954;--ink:#333;--faint:#ccc;background:#fff"
HEADER = (
    "| curve | policy | replicas above need, % | below need, % | first token late, % "
    "| tokens slow, % | turns |\n|---|---|---|---|---|---|---|"
)


def curves(one: float) -> dict[str, Curve]:
    """Return requests per second by the second; `one` is what one replica takes."""
    return {
        "constant": lambda _: 2.5 * one,
        "step": lambda t: (0.7 if t < 300 else 4.5) * one,
        "ramp": lambda t: (0.5 + 5 * min(t / 900, 1)) * one,
        "diurnal": lambda t: (3 + 2.7 * math.sin(2 * math.pi * t / SECONDS)) * one,
        "burst": lambda t: (6 if 600 <= t < 630 else 0.7) * one,
        "sawtooth": lambda t: (0.8 + 0.5 * (t % 60) / 60) * one,
        "silence": lambda t: (0.0 if 400 <= t < 1000 else 0.6) * one,
    }


POLICIES: dict[str, Callable[[], Policy]] = {"SLO": slo_policy, "requests": PlainRequests}


def write_plot(folder: Path, name: str, runs: dict[str, Run]) -> None:
    """Draw replicas needed and ready over time."""
    samples = next(iter(runs.values())).samples
    lines = {"needed": [(at, float(needed)) for at, _, needed in samples[::POINTS_S]]}
    for policy, run in runs.items():
        lines[policy] = [(at, float(ready)) for at, ready, _ in run.samples[::POINTS_S]]
    plot = Plot(title=name, x_label="s", y_label="replicas", lines=lines, is_log_x=False)
    svg = line_plot(plot).replace("<svg ", f'<svg style="{COLOURS}" ', 1)
    (folder / f"autoscaling-{name}.svg").write_text(svg, encoding="utf-8")


def main() -> None:
    """Run every curve with every policy."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    explain.publish = explain.retract = lambda *_: None  # type: ignore[assignment]
    lines = [HEADER]
    for name, curve in curves(capacity()).items():
        runs = {
            policy: Simulation(make(), low=0 if name == "silence" else 1).run(curve, SECONDS)
            for policy, make in POLICIES.items()
        }
        for policy, run in runs.items():
            shares = (run.over, run.under, run.late(), run.slow)
            figures = " | ".join(f"{100 * share:.1f}" for share in shares)
            lines.append(f"| {name} | {policy} | {figures} | {run.num_turns} |")
        if len(sys.argv) > 1:
            write_plot(Path(sys.argv[1]), name, runs)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
