"""Write a table of how many programs of each kernel a multiprocessor holds, and what they read.

    python tests/kernels/gpu/ahead/occupancy.py [sm_90] [FAMILY ...] > table.md

Compiles the launches in `launches/`. Little's law: to read at the memory's rate, all programs of a
multiprocessor together must have as many bytes in flight as arrive during one access.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPILE = Path(__file__).parents[1] / "compile.py"
LATENCY_S = 800e-9  # of an access to loaded device memory


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of a multiprocessor, and its share of the memory's rate.

    shared:  KiB for all programs, of which each takes one more than it asks for
    """

    warps: int
    programs: int
    shared: int
    bytes_per_s: float
    registers: int = 65536

    @property
    def needed(self) -> int:
        """Bytes in flight that the memory's rate needs."""
        return round(self.bytes_per_s * LATENCY_S)

    def programs_of(self, needs: dict[str, Any]) -> int:
        """Return the programs that run at a time; registers are given to warps in 256s."""
        of_warp: int = -(-needs["registers"] * 32 // 256) * 256
        warps: int = needs["warps"]
        of_shared: int = self.shared * 1024 // (needs["shared"] + 1024)
        return min(
            self.programs, self.warps // warps, self.registers // of_warp // warps, of_shared
        )


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164, 2.0e12 / 108),  # A100
    "sm_90": Multiprocessor(64, 32, 228, 4.8e12 / 132),  # H200
    "sm_100": Multiprocessor(64, 32, 228, 8.0e12 / 148),  # B200
    "sm_120": Multiprocessor(48, 24, 100, 1.8e12 / 170),  # RTX 5090
}


def compiled(arch: str, chosen: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Compile launches in a process of their own; return what each kernel needs."""
    done = subprocess.run(
        [sys.executable, str(COMPILE), arch, *chosen], stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(arch: str, made: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Return a line for each kernel with copies to shared memory, and for the others' worst."""
    limits = MULTIPROCESSORS[arch]
    rows: list[list[str]] = []
    least: dict[str, tuple[int, int]] = {}  # of a kernel without copies: bytes in flight, line
    for needs in made:
        programs = limits.programs_of(needs)
        in_flight = programs * needs["in_flight"]
        has_copies = needs["wide"] + needs["narrow"] > 0
        cores = "wgmma" if needs["wgmma"] else "mma" if needs["mma"] else ""
        row = [
            f"{needs['family']}: {needs['case']}",
            f"`{needs['kernel'].removesuffix('_kernel')}`",
            str(needs["warps"]),
            str(needs["registers"]),
            f"{needs['shared'] / 1024:.0f}",
            str(programs),
            f"{in_flight / 1024:.0f}",
            f"{needs['wide']} + {needs['narrow']}" if has_copies else "",
            cores,
        ]
        before, line = least.get(needs["kernel"], (in_flight + 1, len(rows)))
        if has_copies:
            if row not in rows:
                rows.append(row)
        elif in_flight < before:
            rows[line : line + 1] = [row]
            least[needs["kernel"]] = in_flight, line
    return rows


def main(arch: str = "sm_90", *families: str) -> None:
    heads = ("case", "kernel", "warps", "registers", "shared KiB", "programs", "KiB in flight")
    head = (*heads, "copies of 16 + 8 bytes", "cores")
    needed = MULTIPROCESSORS[arch].needed / 1024
    sys.stdout.write(f"{arch}: the memory's rate needs {needed:.0f} KiB in flight.\n\n")
    for row in [head, ["---"] * len(head), *rows_of(arch, compiled(arch, families))]:
        sys.stdout.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
