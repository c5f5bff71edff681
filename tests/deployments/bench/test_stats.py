"""Percentiles, goodput and ratios, compared with their definitions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.bench.stats import (
    Ratio,
    Slo,
    Trace,
    figures_of,
    median_figures,
    percentile,
    ratio_of,
    spread_of,
)

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)
positive = st.floats(1e-3, 1e3)


def make_trace(
    stamps_s: Sequence[float], *, tokens: int | None = None, prompt: int = 10, cached: int = 0
) -> Trace:
    return Trace(
        started_s=0.0,
        stamps_s=stamps_s,
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=len(stamps_s) if tokens is None else tokens,
    )


@given(numbers, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_with_the_percentage(values: list[float], one: float, two: float) -> None:
    found = [percentile(values, percent) for percent in (0, *sorted((one, two)), 100)]

    assert (found[0], found[-1]) == (min(values), max(values))
    # A rounding of the interpolation may differ by the last bit.
    assert found[1] <= found[2] + 1e-9
    assert all(found[0] <= each <= found[-1] for each in found)
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_percentiles_are_interpolated_and_need_values() -> None:
    assert percentile([30.0, 10.0, 20.0, 40.0], 90) == pytest.approx(37.0)
    with pytest.raises(ValueError, match="empty"):
        percentile([], 50)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9))
def test_ratios_of_rounds_enclose_and_swap_with_the_sides(pairs: list[tuple[float, float]]) -> None:
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    there, back = ratio_of(a, b), ratio_of(b, a)

    assert there.low <= there.high
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high)
    medians = Ratio(ratio=2.0, low=1.0, high=4.0, num_rounds=3)
    assert ratio_of([10.0, 30.0, 20.0], [10.0, 10.0, 5.0]) == medians


@pytest.mark.parametrize(
    ("low", "high", "rounds", "is_clear"),
    [(1.4, 1.6, 2, True), (0.9, 1.9, 2, False), (1.5, 1.5, 1, False)],
)
def test_a_difference_is_clear_when_it_is_wider_than_the_spread(
    low: float, high: float, rounds: int, is_clear: bool
) -> None:
    assert Ratio(ratio=1.5, low=low, high=high, num_rounds=rounds).is_clear is is_clear


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_a_ratio_of_nothing_or_of_zero_is_an_error(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_of(a, b)


def test_time_per_token_counts_tokens_not_pieces() -> None:
    trace = make_trace([1.0, 2.0, 3.0], tokens=5)

    assert (trace.ttft_s, trace.tpot_s, trace.gaps_s) == (1.0, 0.5, [1.0, 1.0])
    assert make_trace([1.0]).tpot_s is make_trace([1.0], tokens=5).tpot_s is None


def test_rates_count_only_what_succeeded() -> None:
    traces = [make_trace([1.0, 2.0]), Trace(started_s=0.0, stamps_s=[0.5], error="gone")]

    figures = figures_of(traces, seconds=4.0)

    assert figures["output_tok_s"] == 0.5
    assert figures["total_tok_s"] == 3.0
    assert figures["failures"] == 1
    assert figures["ttft_p50_ms"] == 1000.0


def test_rates_of_one_request_one_token_and_cached_prompts() -> None:
    alone = figures_of([make_trace([1.0, 1.5, 2.0])], seconds=2.0)
    prompts = figures_of([make_trace([0.5], prompt=100)], seconds=0.5)

    assert alone["decode_tok_s"] == pytest.approx(2.0)
    assert "prefill_tok_s" not in alone
    assert prompts["prefill_tok_s"] == pytest.approx(200.0)
    assert "decode_tok_s" not in prompts
    cached = figures_of([make_trace([1.0], cached=5), make_trace([1.0])], seconds=1.0)
    assert cached["cached_share"] == pytest.approx(0.25)


def test_goodput_counts_requests_that_met_both_limits() -> None:
    slo = Slo(ttft_ms=1000, tpot_ms=600)
    quick, late, slow = make_trace([1.0, 1.5]), make_trace([1.5, 2.0]), make_trace([0.5, 1.5])

    figures = figures_of([quick, late, slow, Trace(started_s=0, error="x")], 2.0, slo)

    assert figures["goodput_share"] == 0.25
    assert figures["goodput_req_s"] == 0.5


@given(
    st.lists(st.lists(positive, min_size=1, max_size=5), min_size=1, max_size=8), positive, positive
)
def test_goodput_grows_with_patience(stamps: list[list[float]], ttft: float, tpot: float) -> None:
    traces = [make_trace(sorted(one)) for one in stamps]

    strict = figures_of(traces, 1.0, Slo(ttft_ms=ttft, tpot_ms=tpot))
    patient = figures_of(traces, 1.0, Slo(ttft_ms=2 * ttft, tpot_ms=2 * tpot))

    assert 0 <= strict["goodput_share"] <= patient["goodput_share"] <= 1


def test_medians_and_spread_are_of_figures_that_every_run_has() -> None:
    runs = [{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0}]

    assert median_figures(runs) == {"a": 2.0}
    assert spread_of(runs) == {"a": (1.0, 3.0)}
