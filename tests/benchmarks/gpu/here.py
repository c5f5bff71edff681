"""Test and measure kernels and engine on the GPU of this machine, with the packages it has.

    python tests/benchmarks/gpu/here.py [--part a|b|c] [--out build] [--work build/gpu-work]
        [--cache build/triton-cache] [--seconds N] [--device auto|cuda|cpu]

    a  ceilings of the device, the engine's steps, correctness at real shapes, logits, GPU tests
    b  serving: offline throughput and profiles; kernels beside those of torch
    c  quantised kernels, adapters, launch tables, memory checkers

Each part runs on its own, in at most eight minutes; without `--part` all run in turn. A stage of a
part runs in processes of its own (`worker.py`), so that what fails, hangs or crashes ends one case.
Writes `gpu-PART.json` and `gpu-PART.tar.gz` (`results.py`). Without a GPU all runs on the CPU with
tiny shapes, to try the scripts: its figures mean nothing. Installs nothing, needs no network.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.gpu import clocks, workers
from tests.benchmarks.gpu.bounds import Bounds
from tests.benchmarks.gpu.cache import relocate
from tests.benchmarks.gpu.parts import CPU_PART_S, PART_S, PARTS, Stage
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.verdict import is_well, verdict

ROOT = Path(__file__).parents[3]
# Import names, and what does not run without them.
NEEDED = {
    "torch": "everything",
    "triton": "everything",
    "numpy": "everything",
    "pydantic": "the engine",
    "safetensors": "the engine",
    "tokenizers": "the engine",
    "jinja2": "the engine",
    "yaml": "the engine",
    "transformers": "logits, peers",
    "pytest": "GPU tests",
    "hypothesis": "GPU tests",
    "pytest_timeout": "GPU tests",
    "xdist": "GPU tests in time",
}
START_S = 90.0  # of a worker's imports
UNRELIABLE = "NO GPU: tiny shapes on a CPU, kernels interpreted. Its figures mean nothing."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=[*PARTS, ""], default="")
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--cache", type=Path, default=Path("build/triton-cache"))
    parser.add_argument("--work", type=Path, default=Path("build/gpu-work"))
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    options = parser.parse_args()
    # So that a stopped run still packs what it has, and ends its workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    say(missing())
    device = found_device() if options.device == "auto" else options.device
    if device == "cpu":
        say(UNRELIABLE)
    seconds = options.seconds or (CPU_PART_S if device == "cpu" else PART_S)
    say(f"{relocate(options.cache.absolute())} compiled kernels in {options.cache}")
    wells = []
    for part in [options.part] if options.part else PARTS:
        results = Results(part, options.out.absolute(), options.work.absolute() / part)
        wells.append(run(part, device, options.cache.absolute(), seconds, results))
    sys.exit(0 if all(wells) else 1)


def run(part: str, device: str, cache: Path, seconds: float, results: Results) -> bool:
    """Run a part and print its verdict; return whether all is well."""
    results.about = {"part": part, "device": device, "missing": missing()}
    started = time.monotonic()
    try:
        _run_stages(PARTS[part], device, cache, seconds, results)
    finally:
        lines = verdict(part, results.stages)
        if device == "cpu":
            lines[0] += f" ({UNRELIABLE})"
        (results.work / "verdict.txt").write_text("\n".join(lines) + "\n")
        left_out = results.pack()
        say("", *lines, f"{time.monotonic() - started:.0f} s; results in {results.out}")
        if left_out:
            say(f"too large for the tar: {', '.join(left_out)}")
    return is_well(results.stages)


def _run_stages(
    stages: tuple[Stage, ...], device: str, cache: Path, seconds: float, results: Results
) -> None:
    bounds: Bounds | None = None
    scale = seconds / sum(stage.seconds for stage in stages)
    until = time.monotonic()
    for stage in stages:
        until += scale * stage.seconds
        say(f"--- {stage.name}")
        setting = Setting(
            device=device, work=str(results.work), bounds=bounds, options=stage.options
        )
        log_path = results.work / f"{stage.name.replace(' ', '-')}.log"
        samples = log_path.with_suffix(".clocks.csv")
        os.environ.update(environment(device, cache))
        with log_path.open("a") as log, clocks.sampled(samples):
            for row in workers.findings(
                lambda first: command(stage, setting, first),  # noqa: B023  # used at once
                silence_s=START_S,
                until=until,
                log=log,
            ):
                whole = {**asdict(Row(model="", what=stage.name)), **row}
                results.add(stage.name, whole)
                say(Row(**whole).line())
                if "bounds" in whole["details"]:
                    bounds = Bounds(**whole["details"]["bounds"])
        if summary := clocks.summarise(samples):
            about = Row(model="", what=f"clocks of {stage.name}", details=summary)
            results.add(stage.name, asdict(about))
        results.pack()


def command(stage: Stage, setting: Setting, first: int) -> list[str]:
    program = str(Path(__file__).with_name("worker.py"))
    return [sys.executable, program, stage.module, setting.written(), str(first)]


def environment(device: str, cache: Path) -> dict[str, str]:
    """Return the variables of workers."""
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(ROOT / ".dev"), str(ROOT), *inherited.split(":")]
    return {
        "PYTHONPATH": ":".join(dict.fromkeys(filter(None, paths))),
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(cache)),
    }


def missing() -> str:
    """Return a line that names the packages that are not installed."""
    names = [name for name in NEEDED if find_spec(name) is None]
    return "Missing packages: " + (
        ", ".join(f"{name} (for {NEEDED[name]})" for name in names) or "none"
    )


def found_device() -> str:
    """Ask torch, in another process: this one must not hold memory of the GPU."""
    asked = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=False
    )
    return done.stdout.split()[-1] if done.returncode == 0 else "cpu"


def say(*lines: str) -> None:
    """Print lines."""
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
