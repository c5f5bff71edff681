"""Compile the kernels of low-rank updates ahead of time, as they are launched; no GPU is needed.

    python tests/kernels/compile_lora.py cuda:90 [hip:gfx942 ...]

A program of its own, because triton either interprets or compiles for as long as a process lives.
Prints a line of JSON for each: the target, what was compiled, and its bytes of shared memory.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from remora.kernels import lora_triton
from remora.kernels.lora import COLUMNS
from remora.kernels.lora_triton import LAUNCHES, MAX_BLOCK
from remora.kernels.row_tiles import LARGE_TILE

KERNELS = (lora_triton.shrink_kernel, lora_triton.look_up_kernel, lora_triton.expand_kernel)
POINTERS = {
    "ranks": "*i32",
    "rows": "*i32",
    "tiles": "*i32",
    "bounds": "*i32",
    "shrunk": "*fp32",
    "token_ids": "*i64",
}
WEIGHTS = {"x", "y", "a", "b"}  # what has the number format of the model


def main(targets: list[str]) -> None:
    """Compile everything for each target."""
    for name in targets:
        backend, _, arch = name.partition(":")
        target = (
            GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
        )
        for found in compiled(target):
            sys.stdout.write(json.dumps({"target": name, **found}) + "\n")


def compiled(target: GPUTarget) -> Iterator[dict[str, Any]]:
    """Yield what came of each kernel and launch, with as many ranks as a block has at most.

    Of the formats bfloat16 is compiled for all, the others for one target: the one with the least
    memory.
    """
    for size, launch in LAUNCHES.items():
        constants = {
            "MAX_RANK": MAX_BLOCK,
            "BLOCK": COLUMNS,
            "M": size,
            "K": launch.inputs,
            "R": MAX_BLOCK,
            "C": launch.columns,
        }
        is_smallest = target.backend == "hip" and size == LARGE_TILE
        dtypes = ("bf16", "fp16", "fp32") if is_smallest else ("bf16",)
        for kernel, dtype in itertools.product(KERNELS, dtypes):
            made = compile(source(kernel, dtype, constants), target, launch.options())
            found = {"kernel": kernel.__name__, "dtype": dtype, "tile": size}
            yield {**found, "shared": made.metadata.shared}


def source(kernel: Any, dtype: str, constants: dict[str, int]) -> ASTSource:
    """Return a kernel with the types it is launched with; memory and sizes are aligned."""
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(WEIGHTS, f"*{dtype}") | POINTERS | dict.fromkeys(used, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in used and not name.startswith("num_")
    }
    return ASTSource(kernel, signature, used, aligned)


if __name__ == "__main__":
    main(sys.argv[1:])
