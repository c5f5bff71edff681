"""What compiled kernels must do on Hopper: tensor cores, wide copies, enough bytes in flight."""

from __future__ import annotations

from typing import Any

from tests.kernels.gpu.ahead.occupancy import MULTIPROCESSORS

HOPPER = MULTIPROCESSORS["sm_90"]
# Products of tiles of 64 or more columns or queries.
WARP_GROUP = {"extend", "experts", "scaled", "blocks", "groups", "invariant"}
# Tiles in shared memory. Others load what they need once, straight into registers.
TILED = {*WARP_GROUP, "split", "latent_split", "latent_extend", "shrink"}
# Bound by reading memory.
READING = {
    *("split", "latent_split", "experts", "scaled", "blocks", "groups", "invariant", "shrink"),
    *("merge", "combine", "reduce_splits", "quantise_rows", "quantise_groups", "summarise"),
    *("norm", "activation", "rotate_and_store", "store", "rope", "compact", "mask"),
}
# Widened in registers to 16 bits, of which a thread takes 8 at a time.
NARROW = ("int8", "e5m2", "e4m3fn", "int4", "fp4")


def faults_of(needs: dict[str, Any]) -> list[str]:
    """Return what a kernel compiled for Hopper does not do as it should."""
    kernel = needs["kernel"].removesuffix("_kernel")
    is_wide = "float32" in needs["case"]  # not for tensor cores
    faults = []
    if needs["local"] > 0 and not is_wide:
        faults.append("uses local memory")
    if kernel in WARP_GROUP and needs["wgmma"] == 0 and not is_wide:
        faults.append("does not use wgmma")
    if kernel in TILED and needs["wide"] == 0:
        faults.append("does not copy 16 bytes at a time")
    if needs["narrow"] > 0 and not any(name in needs["case"] for name in NARROW):
        faults.append("copies fewer than 16 bytes at a time")
    in_flight = HOPPER.programs_of(needs) * needs["in_flight"]
    if kernel in READING and in_flight < HOPPER.needed and not is_wide:
        faults.append(f"has {in_flight} bytes in flight")
    return faults
