"""A finding, as a row of the tables: what was measured, its bound, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.benchmarks.gpu.bounds import Bounds

TOKENS_PER_S = "tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A finding of one case.

    value:        None if there is no number, only an outcome
    share:        of the bound that `limit` names
    asked:        what is asked of the value or the share; empty = nothing
    ok:           whether it is as asked; None = nothing is asked
    is_headline:  whether the verdict shows it when all is well
    details:      for the file only
    failure:      why there is no finding
    """

    model: str
    what: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    limit: str = ""
    asked: str = ""
    ok: bool | None = None
    is_headline: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def found(self, value: float, unit: str, **more: Any) -> Row:
        """Return the row with a value."""
        return replace(self, value=value, unit=unit, **more)

    def timed(self, seconds: float, bounds: Bounds | None, *, moved: float, flops: float) -> Row:
        """Return the row with a kernel's time, and its share of the bound that is closer.

        bounds:  None = unknown
        moved:   bytes that must be read and written
        """
        if bounds is None:
            return self.found(seconds * 1e6, "us")
        moved_s, computed_s = moved / bounds.bytes_per_s, flops / bounds.flops_per_s
        return self.found(
            seconds * 1e6,
            "us",
            share=max(moved_s, computed_s) / seconds,
            limit="bytes" if moved_s >= computed_s else "products",
        )

    def asking_share(self, least: float) -> Row:
        """Ask for a share of the bound."""
        is_met = None if self.share is None else self.share >= least
        return replace(self, asked=f">= {least:.0%}", ok=is_met, is_headline=True)

    def asking_at_most(self, most: float) -> Row:
        """Ask for a value, or less."""
        is_met = None if self.value is None else self.value <= most
        return replace(self, asked=f"<= {most:g} {self.unit}", ok=is_met)

    @property
    def is_bad(self) -> bool:
        """Whether it failed or is not as asked."""
        return bool(self.failure) or self.ok is False

    def line(self) -> str:
        """Return a line of a table."""
        outcome = {True: "ok", False: "NOT", None: ""}[self.ok]
        if self.failure:
            return f"{'FAIL':4} {self.model:14} {self.what:46} {self.failure}"
        value = "" if self.value is None else f"{self.value:12.3f} {self.unit:9}"
        share = "" if self.share is None else f"{self.share:7.1%} of {self.limit}"
        return f"{outcome:4} {self.model:14} {self.what:46} {value} {share} {self.asked}".rstrip()
