"""What a compiled kernel needs of a GPU, and how it computes and reads, from its assembly.

Bytes in flight are those that a program has requested and does not use yet: of each buffer in
shared memory with several places all but one; without buffers, all that the program loads outside
of loops and in one round of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from math import prod
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

TYPE_BYTES = {"f8": 1, "i8": 1, "i1": 1, "f16": 2, "bf16": 2, "i16": 2, "f32": 4, "i32": 4}
WIDE = 16  # bytes of the widest copy of a thread


def needs_of(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Return counts by name.

    registers, spilled:  of a thread; bytes, on AMD vector registers, in which scalar ones fit
    shared, warps:       of a program
    local:               uses of memory for what does not fit into registers
    wgmma, mma:          instructions of tensor cores, of Hopper and older
    wide, narrow:        asynchronous copies to shared memory of 16 bytes a thread, and of less,
                         without those of 4 bytes, of page ids and scales
    in_flight:           bytes of a program
    """
    metadata = compiled.metadata
    needs = {"shared": metadata.shared, "warps": metadata.num_warps}
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)
        assert registers is not None
        return {**needs, "registers": int(registers[1]), "spilled": sum(map(int, spilled))}
    ptx = compiled.asm["ptx"]
    copies = [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.\S+[^;]*?, (0x\w+|\d+)", ptx)]
    return {
        **needs,
        **_assembled(ptx, target),
        "local": len(re.findall(r"(?:ld|st)\.local", ptx)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "wide": sum(size == WIDE for size in copies),
        "narrow": sum(4 < size < WIDE for size in copies),
        "in_flight": bytes_in_flight(compiled.asm["ttgir"]),
    }


def _assembled(ptx: str, target: GPUTarget) -> dict[str, int]:
    match = re.search(r"\.target (sm_\w+)", ptx)
    assert match is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={match[1]}", file.name]
        output = subprocess.run(
            [*command, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
    registers = re.search(r"Used (\d+) registers", output)
    spilled = re.findall(r"(\d+) bytes spill", output)
    assert registers is not None
    return {"registers": int(registers[1]), "spilled": sum(map(int, spilled))}


def bytes_in_flight(ttgir: str) -> int:
    """Return the bytes in flight of a program, from triton's code for a GPU."""
    live: dict[str, int] = {}
    most = 0
    for line in ttgir.splitlines():
        made = re.search(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\S+?),", line)
        if made is not None:
            places, block = made[2].split("x", 1)
            live[made[1]] = (int(places) - 1) * _bytes_of(block)
            most = max(most, sum(live.values()))
        ended = re.search(r"ttg\.local_dealloc (%\S+)", line)
        if ended is not None:
            live.pop(ended[1], None)
    if most > 0:
        return most
    loads = re.findall(r"= tt\.load .* : tensor<(\S+?)x!tt\.ptr<(\w+)>", ttgir)
    return sum(_bytes_of(f"{shape}x{element}") for shape, element in loads)


def _bytes_of(block: str) -> int:
    """Return the bytes of a block like 64x128xbf16."""
    *shape, element = block.split("x")
    size = next((size for name, size in TYPE_BYTES.items() if element.startswith(name)), 8)
    return prod(map(int, shape)) * size
