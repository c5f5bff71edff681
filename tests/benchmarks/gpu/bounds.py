"""The device's bounds: its speed of copying and of multiplying.

Other results are reported as a share of these two. `stages/ceilings.py` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes a second, read and written together, and operations a second in bfloat16.

    read_bytes_per_s:  bytes a second that are only read
    """

    bytes_per_s: float
    flops_per_s: float
    read_bytes_per_s: float
