"""Measure every kernel and the engine on a GPU against the device's bounds.

    python tests/benchmarks/gpu/run.py [--only kernels|engine] [--json PATH] [--seconds 300]
        [--interpret]

The device's speed of copying and of multiplying bfloat16 is measured first; other results are
reported as a share of these two (`kernels.py`, `engine.py`). Measurements run in separate processes
(`workers.py`), the engine first: if the time is up, some kernels are missing. Results are written
as JSON whenever there are more, and printed as one table at the end. `--interpret` calls
each kernel once on tiny inputs, and the engine, where there is no GPU, and times nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.gpu import workers
from tests.benchmarks.gpu.bounds import Bounds, measure_bounds
from tests.benchmarks.gpu.rows import RATE, Found, Measured

HERE = Path(__file__).parent
# What the engine does, and afterwards, when it has left the GPU, transformers.
ENGINE_PARTS = (
    ("llama-3.1-8b", "engine"),
    ("llama-3.1-8b", "transformers"),
    ("qwen3-0.6b", "engine"),
    ("qwen3-0.6b", "transformers"),
    ("qwen3-30b-a3b", "engine"),
    ("qwen3-30b-a3b", "transformers"),
)
SILENCE_S = 120  # a kernel compiles in seconds, a model is loaded and recorded in tens of them
Rows = dict[str, list[dict[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["kernels", "engine"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    # Triton reads it when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"
    if not options.interpret and not torch.cuda.is_available():
        sys.exit("There is no GPU; --interpret checks the kernels without one.")
    device = torch.device("cpu" if options.interpret else "cuda")
    bounds = measure_bounds(device)
    about = {"machine": machine(device), "bounds": asdict(bounds)}
    found: Rows = {"engine": [], "kernels": []}
    for part in found:
        if options.only in (None, part):
            for row in (
                interpreted(part, bounds) if options.interpret else on_gpu(part, bounds, until)
            ):
                found[part].append(row)
                sys.stderr.write(line(part, row) + "\n")
                if options.json:
                    write(options.json, {**about, **found})
    show(bounds, found)
    if any(row["failure"] for rows in found.values() for row in rows):
        sys.exit("Some measurements failed.")


def on_gpu(part: str, bounds: Bounds, until: float) -> Iterator[dict[str, Any]]:
    """Measure kernels or engine, by workers."""
    if part == "kernels":
        about = asdict(Measured("", "kernels.py", "", 0.0, 0.0))
        yield from worked("kernels.py", [], about, bounds, until)
        return
    rates: dict[str, float] = {}
    for model, whose in ENGINE_PARTS:
        options = ["--model", model, "--whose", whose]
        for row in worked("engine.py", options, asdict(Found(model, whose)), bounds, until):
            yield row
            if row["unit"] == RATE:
                rates[f"{model} {whose}"] = row["value"]
        ours, theirs = rates.get(f"{model} engine"), rates.get(f"{model} transformers")
        if whose == "transformers" and ours and theirs:
            yield asdict(Found(model, "engine / transformers", ours / theirs, "times"))


def worked(
    script: str, options: Sequence[str], about: dict[str, Any], bounds: Bounds, until: float
) -> Iterator[dict[str, Any]]:
    """Yield what workers of a script find; `about` stands for one that dies before it begins."""
    command = [sys.executable, str(HERE / script), *options, "--bounds", bounds.written()]
    for row in workers.findings(
        lambda first: [*command, "--first", str(first)], silence_s=SILENCE_S, until=until
    ):
        yield {**about, **row}


def interpreted(part: str, bounds: Bounds) -> Iterator[dict[str, Any]]:
    """Call everything once, small, in this process and without a GPU."""
    if part == "kernels":
        from tests.benchmarks.gpu import kernels

        for measured in kernels.interpret():
            yield asdict(measured)
        return
    from tests.benchmarks.gpu import engine

    for name, whose in itertools.product(("tiny", "tiny-moe"), engine.WHOSE):
        for place in engine.places(name, whose, bounds, tiny=True):
            for found in place.measure():
                yield asdict(found)


def line(part: str, row: dict[str, Any]) -> str:
    """Return a row of the table."""
    return (Measured(**row) if part == "kernels" else Found(**row)).line()


def show(bounds: Bounds, found: Rows) -> None:
    """Print the table, what is looked for first last."""
    copied, multiplied = bounds.bytes_per_s / 1e12, bounds.flops_per_s / 1e12
    for part in ("kernels", "engine"):
        for row in found[part]:
            sys.stdout.write(line(part, row) + "\n")
    sys.stdout.write(f"copies {copied:.3f} TB/s, multiplies {multiplied:.1f} TFLOP/s\n")


def write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def machine(device: torch.device) -> dict[str, str]:
    """Return the versions and devices that the figures depend on."""
    packages = {}
    for name in ("torch", "triton", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor(),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **packages,
    }


if __name__ == "__main__":
    main()
