"""Rows of the table: of a kernel alone, and of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.benchmarks.gpu.bounds import Bounds
from tests.benchmarks.gpu.timing import Case

RATE = "tokens/s"


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel's time; `limit` names what its share is of. Interpreted ones have no time.

    failure:  why there is none otherwise
    """

    model: str
    kernel: str
    shape: str
    num_bytes: float
    flops: float
    microseconds: float | None = None
    share: float | None = None
    limit: str = ""
    failure: str = ""

    @classmethod
    def of(cls, case: Case) -> Measured:
        """Return what is known beforehand."""
        return cls(case.model, case.kernel, case.shape, case.num_bytes, case.flops)

    def timed(self, seconds: float, bounds: Bounds) -> Measured:
        """Return it with its time, and what share of the bound that is."""
        moved_s, computed_s = self.num_bytes / bounds.bytes_per_s, self.flops / bounds.flops_per_s
        return replace(
            self,
            microseconds=seconds * 1e6,
            share=max(moved_s, computed_s) / seconds,
            limit="bytes" if moved_s >= computed_s else "products",
        )

    def line(self) -> str:
        times = ""
        if self.microseconds is not None and self.share is not None:
            times = f"{self.microseconds:11.1f} us {self.share:7.1%} of {self.limit}"
        return f"{self.model:14} {self.kernel:28} {self.shape:34} {times}{self.failure}"


@dataclass(frozen=True, slots=True)
class Found:
    """What the engine, or another, has done.

    share:    of the bound; None where there is none
    failure:  why there is no value
    """

    model: str
    what: str
    value: float = 0.0
    unit: str = ""
    share: float | None = None
    failure: str = ""

    def line(self) -> str:
        value = self.failure or f"{self.value:12.3f} {self.unit:9}"
        share = "" if self.share is None else f"{self.share:7.1%}"
        return f"{self.model:14} {self.what:34} {value} {share}"
