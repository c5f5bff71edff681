"""Names, order and formatting of figures.

A figure's name ends in its unit, which implies whether more is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# In order of preference.
HEADLINES = ("decode_tok_s", "prefill_tok_s", "output_tok_s", "total_tok_s")
COMPARED = (
    "decode_tok_s",
    "prefill_tok_s",
    "output_tok_s",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "offline_s",
    "serve_s",
)
_MORE_IS_BETTER = ("tok_s", "req_s", "share")


def headline(figures: Mapping[str, float]) -> str | None:
    """Return the name of the most important figure; None if it has none of HEADLINES."""
    return next((name for name in HEADLINES if figures.get(name)), None)


def compared(a: Mapping[str, float], b: Mapping[str, float]) -> list[str]:
    """Return the figures of A and B to compare: those of COMPARED, or else all common ones."""
    both = [name for name in a if name in b and a[name] > 0 and b[name] > 0]
    usual = [name for name in COMPARED if name in both]
    is_decode = "decode_tok_s" in usual
    is_prefill = "prefill_tok_s" in usual
    drop = {"output_tok_s"} if is_decode or is_prefill else set()
    if is_decode:
        drop.add("tpot_p50_ms")  # the reciprocal of the decode rate
    return [name for name in usual if name not in drop] or both


def more_is_better(name: str) -> bool:
    """Whether a larger value of the figure is better."""
    return name.endswith(_MORE_IS_BETTER) and name != "overhead_share"


def number(value: float | None) -> str:
    """Format a number with at least three significant digits."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Format a share as a percentage."""
    return "-" if value is None else f"{value * 100:.1f} %"


def triple(figures: Mapping[str, float], name: str) -> str:
    """Format p50, p90 and p99 of a time."""
    values = [figures.get(f"{name}_p{percent}_ms") for percent in (50, 90, 99)]
    return joined(values)


def joined(values: Iterable[float | None]) -> str:
    """Format several numbers for one cell; a dash if all are None."""
    found = list(values)
    return "-" if all(value is None for value in found) else " / ".join(map(number, found))
