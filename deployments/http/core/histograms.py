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
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        self._series(("",) * len(self._labels))

    def _series(self, labels: tuple[str, ...]) -> list[int]:
        counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        self._sums[labels] = 0.0
        return counts

    def observe(self, value: float, num: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Note `num` times the same, of a request with these values of its own labels."""
        counts = self._counts.get(labels) or self._series(labels)
        counts[bisect_left(self._bounds, value)] += num
        self._sums[labels] += value * num

    def collect(self) -> Iterable[Metric]:
        """Yield the histogram."""
        names = ["model_name", *self._labels]
        metric = HistogramMetricFamily(self._name, self._text, labels=names)
        for labels, counts in tuple(self._counts.items()):
            totals = list(accumulate(counts))
            shown = [(str(edge), totals[bisect_left(self._bounds, edge)]) for edge in self._shown]
            buckets = [*shown, ("+Inf", totals[-1])]
            metric.add_metric([self._model, *labels], buckets, self._sums[labels])
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
        return tuple(map(sum, zip(*self._counts.values(), strict=True)))
