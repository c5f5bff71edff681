"""Counts the kernels that Triton compiles, or reads from its cache, and the seconds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Compiles:
    """What has been compiled so far.

    num_read:  kernels that were in the cache
    """

    num_compiled: int = 0
    num_read: int = 0
    seconds: float = 0.0

    @property
    def num_kernels(self) -> int:
        """Kernels that a launch met for the first time in this process."""
        return self.num_compiled + self.num_read

    def listen(self) -> Compiles:
        """Count from now on."""
        import triton.knobs

        triton.knobs.compilation.listener = self
        return self

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Count a kernel; Triton calls it."""
        self.num_compiled += not cache_hit
        self.num_read += cache_hit
        self.seconds += times.total / 1e6


COMPILES = Compiles()  # of this process
