"""Compile kernels ahead of time for a GPU that is not here, exactly as they are launched.

    python tests/kernels/gpu/compile.py sm_90 [FAMILY ...]

A program of its own, because triton either interprets or compiles for as long as a process lives.
The functions in `launches/` call the product on tensors without memory; what they launch is
compiled in place of being run. Prints a line of JSON for each kernel: what it needs and spills.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.kernels.gpu.ahead.absent import pretend, target_of  # isort: skip

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from remora.kernels.gpu.arch import Arch

LAUNCHES = Path(__file__).parent / "launches"


def main(name: str, families: list[str]) -> None:
    """Compile what the families launch, by default all of them, for one target."""
    arch = Arch(name)
    target = target_of(arch)
    pretend(arch, "meta")
    made = compile_instead_of_running()
    for family in families or sorted(path.stem for path in LAUNCHES.glob("*.py")):
        launches = importlib.import_module(f"tests.kernels.gpu.launches.{family}")
        pretend(arch, "meta")
        for case, launch in launches.LAUNCHES.items():
            made.clear()
            launch()
            for kernel, compiled, seconds in made:
                found = {"family": family, "case": case, "kernel": kernel, "target": name}
                needs = {"shared": compiled.metadata.shared, **needs_of(compiled, target)}
                sys.stdout.write(json.dumps({**found, **needs, "seconds": round(seconds, 2)}))
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


def needs_of(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Return registers of a thread, and bytes that it spills (on AMD: registers)."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        spilled = re.findall(r"\.[vs]gpr_spill_count:\s*(\d+)", text)
        assert registers is not None
        return {"registers": int(registers[1]), "spilled": sum(int(each) for each in spilled)}
    match = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])
    assert match is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={match[1]}", file.name]
        output = subprocess.run(
            [*command, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
    registers = re.search(r"Used (\d+) registers", output)
    spilled = re.findall(r"(\d+) bytes spill", output)
    assert registers is not None
    return {"registers": int(registers[1]), "spilled": sum(int(each) for each in spilled)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
