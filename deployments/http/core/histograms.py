"""Histograms that cost little: noting a value, which happens per token, is a search and a sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Counted in finer steps than shown, from half a millisecond to five minutes: percentiles taken
# from the counts (deployments/autoscaling) are off by a tenth at most, for nothing per token.
_FINE_S = tuple(0.0005 * 2 ** (step / 8) for step in range(155))


class Series:
    """Counts and sum of one set of label values.

    bounds:  [num_bounds] upper edges, ascending
    counts:  [num_bounds + 1]
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """Note `num` times the same value."""
        self.counts[bisect_left(self._bounds, value)] += num
        self.total += value * num


class Histogram(Collector):
    """One histogram, with a series for each set of values of a request's own labels.

    shown:   upper edges of the buckets, ascending
    counted: further edges, which are counted and not shown
    labels:  names of the requests' own labels
    """

    def __init__(
        self,
        name: str,
        text: str,
        model: str,
        shown: Sequence[float],
        *,
        counted: Iterable[float] = (),
        labels: Sequence[str] = (),
    ) -> None:
        self._name, self._text, self._model = name, text, model
        self._shown = tuple(shown)
        self._labels = tuple(labels)
        self._bounds = tuple(sorted({*shown, *counted}))
        self._series: dict[tuple[str, ...], Series] = {}
        self.series(("",) * len(self._labels))

    def series(self, labels: tuple[str, ...]) -> Series:
        """Return the series of these values of a request's own labels."""
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Series(self._bounds)
        return found

    def observe(self, value: float, num: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Note `num` times the same value, of a request with these values of its own labels."""
        self.series(labels).observe(value, num)

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram."""
        names = ["model_name", *self._labels]
        metric = HistogramMetricFamily(self._name, self._text, labels=names)
        for labels, series in tuple(self._series.items()):
            totals = list(accumulate(series.counts))
            shown = [(str(edge), totals[bisect_left(self._bounds, edge)]) for edge in self._shown]
            buckets = [*shown, ("+Inf", totals[-1])]
            metric.add_metric([self._model, *labels], buckets, series.total)
        yield metric


class Latencies(Histogram):
    """A histogram of seconds, counted finely enough for percentiles.

    bounds_s:  [num_bounds] upper ends of what is counted together, ascending
    """

    def __init__(
        self,
        name: str,
        text: str,
        model: str,
        shown_s: Sequence[float],
        *,
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__(name, text, model, shown_s, counted=_FINE_S, labels=labels)
        self.bounds_s = self._bounds

    def counts(self) -> tuple[int, ...]:
        """Return how many were noted up to each bound and above the one before, and above all."""
        return tuple(
            map(sum, zip(*(series.counts for series in self._series.values()), strict=True))
        )
