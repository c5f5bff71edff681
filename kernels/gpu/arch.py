"""Which make of GPU a tensor lies on, as far as launches differ between makes.

Launch tables are keyed by it, are checked in and are never tuned while serving. An entry must fit
the shared memory of its make.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch


class Arch(Enum):
    """A make of GPU."""

    AMPERE = "sm_80"  # A100
    HOPPER = "sm_90"  # H100, H200
    BLACKWELL = "sm_100"  # B200
    SMALL = "sm_120"  # and sm_86, sm_89: cards for desks, L4, L40
    CDNA = "gfx942"  # MI300

    @property
    def shared_bytes(self) -> int:
        """Most bytes of shared memory that a block may have."""
        return _SHARED_KIB[self] * 1024


_SHARED_KIB = {
    Arch.AMPERE: 163,
    Arch.HOPPER: 227,
    Arch.BLACKWELL: 227,
    Arch.SMALL: 99,
    Arch.CDNA: 64,
}
_CAPABILITIES = {(8, 0): Arch.AMPERE, (9, 0): Arch.HOPPER, (10, 0): Arch.BLACKWELL}


@cache
def arch_of(device: torch.device) -> Arch:
    """Return the make of a device; where kernels are interpreted, what stands in for one."""
    if device.type != "cuda":
        return Arch.HOPPER
    if torch.version.hip is not None:
        return Arch.CDNA
    return _CAPABILITIES.get(torch.cuda.get_device_capability(device), Arch.SMALL)


def has_fp8(device: torch.device) -> bool:
    """Whether the tensor cores of a device multiply float8_e4m3fn; CDNA's have other formats."""
    arch = arch_of(device)
    if arch is Arch.SMALL and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return arch in (Arch.HOPPER, Arch.BLACKWELL, Arch.SMALL)
