"""Compile what `here.py` launches for a GPU that is absent, into a cache that it finds there.

    python tests/benchmarks/gpu/fill_cache.py [--arch sm_90] [--cache build/triton-cache]

Triton's key of a kernel consists of the source of Triton itself with its compiled library, the
kernel's source, its first line and the functions and globals that it uses, argument types and which
are divisible by 16, constants, launch options, the target and ptxas' version. No path is in it, but
the library differs between versions of Python: the cache serves a machine with the same wheel of
Triton and the same checkout. Only binaries are kept. The launchers, a small C extension for each
signature, are linked with the driver and are compiled there.

Launches are those of `tests/kernels/gpu/launches` and of the cases, made with tensors without
memory; a launch that needs values is passed over. An entry that is missing is compiled there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

if TYPE_CHECKING:
    from tests.benchmarks.gpu.timing import KernelCase

ROOT = Path(__file__).parents[3]
MAX_TOLD = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--cache", type=Path, default=Path("build/triton-cache"))
    options = parser.parse_args()
    # Triton reads them when it is first imported.
    os.environ["TRITON_CACHE_DIR"] = str(options.cache.absolute())
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    failures = fill(options.arch)
    from tests.benchmarks.gpu.compiles import COMPILES

    for source in options.cache.glob("*/*.source"):  # for readers of the cache, not for Triton
        source.unlink()
    size = sum(path.stat().st_size for path in options.cache.rglob("*") if path.is_file())
    sys.stdout.write(
        f"{COMPILES.num_compiled} kernels compiled, {COMPILES.num_read} were there; "
        f"{len(failures)} launches need values; {size / 2**20:.1f} MiB in {options.cache}\n"
    )
    for failure in failures[:MAX_TOLD]:
        sys.stdout.write(f"  {failure}\n")


def fill(arch_name: str) -> list[str]:
    """Compile all launches; return those that cannot be made without values, and why."""
    from tests.kernels.gpu.ahead.absent import pretend  # isort: skip  # before other imports

    from triton.runtime.jit import JITFunction

    from remora.kernels.gpu.arch import Arch
    from tests.benchmarks.gpu.compiles import COMPILES

    COMPILES.listen()
    run, arch, failures = JITFunction.run, Arch(arch_name), []

    def compile_only(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> object:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    for name, launch in launches():
        pretend(arch, "meta")  # also modules that were imported since
        try:
            launch()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}"[:200])
    return failures


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield launches on tensors without memory, with their names."""
    for path in sorted((ROOT / "tests" / "kernels" / "gpu" / "launches").glob("*.py")):
        module = importlib.import_module(f"tests.kernels.gpu.launches.{path.stem}")
        for name, launch in module.LAUNCHES.items():
            yield f"{path.stem}, {name}", launch
    from tests.benchmarks.gpu.cases import real_shapes
    from tests.benchmarks.gpu.stages.kernels import checked_cases

    for tiny in (False, True):
        for case in (*checked_cases(tiny=tiny), *real_shapes.cases_without_pools(tiny=tiny)):
            yield f"{case.kernel} {case.shape}", partial(call, case)


def call(case: KernelCase) -> object:
    """Make a case's inputs without memory, and launch it."""
    return case.make(torch.device("meta"), torch.bfloat16).run()


if __name__ == "__main__":
    main()
