"""Compile kernels ahead of time for a GPU that is not here, exactly as they are launched.

    python tests/kernels/gpu/compile.py sm_90 [FAMILY ...]
    python tests/kernels/gpu/compile.py sm_90 "moe/bfloat16, 8 tokens"

A program of its own, because triton either interprets or compiles for as long as a process lives.
The functions in `launches/` call the product on tensors without memory; what they launch is
compiled in place of being run. Prints a line of JSON for each kernel: what it needs and does.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.kernels.gpu.ahead.absent import pretend, target_of  # isort: skip

from triton.runtime.jit import JITFunction

from remora.kernels.gpu.arch import Arch
from tests.kernels.gpu.ahead.needs import needs_of

LAUNCHES = Path(__file__).parent / "launches"


def main(name: str, chosen: list[str]) -> None:
    """Compile launches of families, or single cases, by default all, for one target."""
    arch = Arch(name)
    target = target_of(arch)
    pretend(arch, "meta")
    made = compile_instead_of_running()
    for each in chosen or sorted(path.stem for path in LAUNCHES.glob("*.py")):
        family, _, only = each.partition("/")
        launches = importlib.import_module(f"tests.kernels.gpu.launches.{family}")
        pretend(arch, "meta")
        for case, launch in launches.LAUNCHES.items():
            if only not in ("", case):
                continue
            made.clear()
            launch()
            for kernel, compiled, seconds in made:
                found: dict[str, Any] = {
                    "family": family,
                    "case": case,
                    "kernel": kernel,
                    "target": name,
                }
                found |= {**needs_of(compiled, target), "seconds": round(seconds, 2)}
                sys.stdout.write(json.dumps(found))
                sys.stdout.write("\n")
                sys.stdout.flush()


def compile_instead_of_running() -> list[tuple[str, Any, float]]:
    """Let launches compile only; what they compile is appended to the list that is returned."""
    made: list[tuple[str, Any, float]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> object:
        started = time.perf_counter()
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        if all(compiled is not other for _, other, _ in made):
            made.append((kernel.__name__, compiled, time.perf_counter() - started))
        return compiled

    JITFunction.run = compile_only
    return made


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
