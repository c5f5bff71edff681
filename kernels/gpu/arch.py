"""GPU architectures, as far as launch parameters differ between them.

Launch tables are keyed by architecture and checked in; nothing is tuned while serving. An entry
must fit the architecture's shared memory.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch


class Arch(Enum):
    """A GPU architecture."""

    AMPERE = "sm_80"  # A100
    HOPPER = "sm_90"  # H100, H200
    BLACKWELL = "sm_100"  # B200
    SMALL = "sm_120"  # also sm_86, sm_89: workstation cards, L4, L40
    CDNA = "gfx942"  # MI300

    @property
    def shared_bytes(self) -> int:
        """Largest shared memory of a block."""
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
    """Return the architecture of a device; HOPPER for interpreted kernels."""
    if device.type != "cuda":
        return Arch.HOPPER
    if torch.version.hip is not None:
        return Arch.CDNA
    return _CAPABILITIES.get(torch.cuda.get_device_capability(device), Arch.SMALL)


def converts_e4m3(device: torch.device) -> bool:
    """Return whether kernels convert float8_e4m3fn to wider formats; CDNA has another e4m3."""
    arch = arch_of(device)
    if arch is Arch.SMALL and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return arch not in (Arch.AMPERE, Arch.CDNA)


def has_fp8(device: torch.device) -> bool:
    """Return whether tensor cores multiply float8_e4m3fn; CDNA's have other formats."""
    arch = arch_of(device)
    if arch is Arch.SMALL and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return arch in (Arch.HOPPER, Arch.BLACKWELL, Arch.SMALL)
