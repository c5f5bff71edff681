"""Statistics of measurements: percentiles, goodput, ratios with their spread.

Pure functions of numbers. Knows no clock, engine, server or report.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Measurements of one request. All times are in seconds on one clock.

    stamps_s:           arrival of each piece of output, in order; a piece has one token or more
    num_output_tokens:  as counted by the engine or server
    error:              why the request failed; the other numbers are then meaningless
    """

    started_s: float
    stamps_s: Sequence[float] = field(default=())
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None if there was none."""
        return self.stamps_s[0] - self.started_s if self.stamps_s and not self.error else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for one token, or all in one piece."""
        if self.error or len(self.stamps_s) < 2 or self.num_output_tokens < 2:
            return None
        return (self.stamps_s[-1] - self.stamps_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces."""
        stamps = () if self.error else self.stamps_s
        return [after - before for before, after in itertools.pairwise(stamps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level objective: maximum milliseconds to the first token and per further token."""

    ttft_ms: float
    tpot_ms: float

    def is_met_by(self, trace: Trace) -> bool:
        """Whether the request succeeded and met both limits (the second needs two tokens)."""
        ttft_s, tpot_s = trace.ttft_s, trace.tpot_s
        if ttft_s is None:
            return False
        return ttft_s * 1e3 <= self.ttft_ms and (tpot_s or 0.0) * 1e3 <= self.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The ratio of A to B over paired rounds.

    ratio:      median of A / median of B
    low, high:  smallest and largest ratio of one round
    """

    ratio: float
    low: float
    high: float
    num_rounds: int

    @property
    def is_clear(self) -> bool:
        """Whether the difference from 1 is larger than the spread between rounds."""
        return self.num_rounds > 1 and self.high - self.low < abs(self.ratio - 1)


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, interpolated between neighbours.

    Raises ValueError for no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("percentile of an empty sequence")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Clamped, because rounding may leave the interval.
    return min(max(low + (high - low) * (place - below), low), high)


def percentiles_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return `name_p50_ms` and so on; nothing for no values."""
    if not seconds:
        return {}
    return {f"{name}_p{percent}_ms": percentile(seconds, percent) * 1e3 for percent in PERCENTILES}


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compare paired rounds of A and B. Raises ValueError unless all values are above zero."""
    if len(a) != len(b) or not a or min(*a, *b) <= 0:
        raise ValueError(f"expected pairs of positive values, found {list(a)} and {list(b)}")
    rounds = [first / second for first, second in zip(a, b, strict=True)]
    return Ratio(
        ratio=statistics.median(a) / statistics.median(b),
        low=min(rounds),
        high=max(rounds),
        num_rounds=len(rounds),
    )


def figures_of(traces: Sequence[Trace], seconds: float, slo: Slo | None = None) -> dict[str, float]:
    """Return the figures of requests that ran together.

    seconds:  from the first send to the last end; rates are per second of this time
    Failed requests count only as failures. A single request has a decode rate; requests for one
    token each have a prefill rate.
    """
    good = [trace for trace in traces if trace.error is None]
    prompt = sum(trace.num_prompt_tokens for trace in good)
    output = sum(trace.num_output_tokens for trace in good)
    figures = {
        "seconds": seconds,
        "requests": float(len(traces)),
        "failures": float(len(traces) - len(good)),
        "output_tok_s": output / seconds,
        "total_tok_s": (prompt + output) / seconds,
        "req_s": len(good) / seconds,
    }
    if good and all(trace.num_output_tokens == 1 for trace in good):
        figures["prefill_tok_s"] = prompt / seconds
    if len(good) == 1 and good[0].tpot_s:
        figures["decode_tok_s"] = 1 / good[0].tpot_s
    figures |= _latencies(good)
    cached = sum(trace.num_cached_tokens for trace in good)
    if cached:
        figures["cached_share"] = cached / prompt
    if slo is not None and traces:
        num_met = sum(map(slo.is_met_by, traces))
        figures |= {"goodput_share": num_met / len(traces), "goodput_req_s": num_met / seconds}
    return figures


def _latencies(good: Sequence[Trace]) -> dict[str, float]:
    gaps = [gap for trace in good for gap in trace.gaps_s]
    return {
        **percentiles_ms("ttft", [t.ttft_s for t in good if t.ttft_s is not None]),
        **percentiles_ms("tpot", [t.tpot_s for t in good if t.tpot_s is not None]),
        **percentiles_ms("itl", gaps),
    }


def median_figures(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure that every run has."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def spread_of(runs: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value of each figure that every run has."""
    return {
        name: (min(run[name] for run in runs), max(run[name] for run in runs))
        for name in median_figures(runs)
    }
