"""What a replica reports, from counters and a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.autoscaling.reports import MAX_SAMPLES, LoadReporter, percentile
from remora.deployments.http.core.histograms import Latencies
from tests.deployments.fakes import make_stats

NOTHING = make_stats(num_pages=100, num_free_pages=100)


class Replica:
    """A clock, counters and latencies that tests turn, and their reporter."""

    def __init__(self, look_back_s: float = 10.0) -> None:
        self.now, self.stats = 100.0, NOTHING
        self.ttft = Latencies("ttft", "", "m", (1.0,))
        self.itl = Latencies("itl", "", "m", (0.1,))
        self.reporter = LoadReporter(
            lambda: self.stats,
            {"ttft": self.ttft, "itl": self.itl},
            look_back_s=look_back_s,
            clock=lambda: self.now,
        )

    def report(self, after_s: float = 0.0, **counters: float) -> dict[str, float]:
        self.now += after_s
        self.stats = replace(self.stats, **counters)  # type: ignore[arg-type]
        report = self.reporter.report()
        assert all(type(value) in (int, float) for value in report.values()), "not for Serve"
        return report


def test_counters_are_reported_as_they_are() -> None:
    report = Replica().report(num_running=3, num_waiting=2, num_queued_tokens=77, num_held_pages=25)

    assert report["num_running"] == 3
    assert report["num_waiting"] == 2
    assert report["queued_tokens"] == 77
    assert report["kv_usage"] == 0.25


def test_a_replica_that_has_served_nobody_reports_no_latencies_and_no_rates() -> None:
    report = Replica().report()
    assert not {"ttft_p90_s", "itl_p90_s", "tokens_per_s", "finished_per_s"} & report.keys()


def test_percentiles_are_of_the_recent_past() -> None:
    replica = Replica()
    replica.report()
    replica.ttft.observe(5.0, 1000)
    replica.report(5.0)
    replica.ttft.observe(0.5, 10)

    assert replica.report(1.0)["ttft_p90_s"] == pytest.approx(5.0, rel=0.1)
    assert replica.report(9.5)["ttft_p90_s"] == pytest.approx(0.5, rel=0.1)
    assert "ttft_p90_s" not in replica.report(20.0)


def test_speed_is_what_was_computed_in_a_second_of_stepping_and_stays_known() -> None:
    replica = Replica()
    replica.report()
    report = replica.report(
        4.0,
        prompt_tokens_total=900,
        cached_tokens_total=200,
        generated_tokens_total=300,
        finished_total=6,
        step_time_total_s=2.0,
        steps_total=9,
    )

    assert report["tokens_per_s"] == 500
    assert report["finished_per_s"] == 3
    assert replica.report(60.0)["tokens_per_s"] == 500


def test_the_shortest_step_is_what_a_token_takes_alone() -> None:
    replica = Replica()
    replica.report(last_step_s=0.02)
    assert replica.report(last_step_s=0.3)["base_itl_s"] == 0.02


def test_a_request_that_came_and_went_between_two_reports_ends_idleness() -> None:
    replica = Replica()
    replica.report()

    assert replica.report(8.0)["idle_s"] == 8
    assert replica.report(1.0, steps_total=5)["idle_s"] == 0
    assert replica.report(2.0)["idle_s"] == 2
    assert replica.report(1.0)["idle_s"] == 3  # however often it reports


def test_the_past_is_as_long_as_it_is_set_to_be() -> None:
    replica = Replica(look_back_s=600.0)
    replica.report()
    replica.ttft.observe(5.0, 1000)
    for _ in range(590):
        report = replica.report(1.0)

    assert report["ttft_p90_s"] == pytest.approx(5.0, rel=0.1)
    for _ in range(30):
        report = replica.report(1.0)
    assert "ttft_p90_s" not in report


def test_state_is_bounded_however_often_it_reports() -> None:
    replica = Replica()
    for _ in range(10 * MAX_SAMPLES):
        replica.report(0.01)
    assert len(replica.reporter._samples) <= MAX_SAMPLES


@given(st.lists(st.floats(0.001, 300), min_size=1, max_size=200), st.sampled_from((0.5, 0.9)))
def test_a_percentile_is_off_by_a_step_of_the_counts_at_most(
    values: list[float], share: float
) -> None:
    latencies = Latencies("x", "", "m", (1.0,))
    for value in values:
        latencies.observe(value)
    exact = sorted(values)[max(-(-len(values) * round(share * 10) // 10) - 1, 0)]

    found = percentile(latencies.bounds_s, latencies.counts(), share)

    assert found == pytest.approx(exact, rel=0.1)


def test_what_is_shown_to_prometheus_keeps_its_bounds() -> None:
    latencies = Latencies("x", "", "m", (0.1, 1.0))
    for value in (0.05, 0.1, 0.2, 5.0):
        latencies.observe(value)

    (metric,) = latencies.collect()

    buckets = {s.labels["le"]: s.value for s in metric.samples if s.name == "x_bucket"}
    assert buckets == {"0.1": 2, "1.0": 3, "+Inf": 4}
