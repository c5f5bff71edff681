"""The arithmetic of limits per minute."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.http.core.rate_limits import MINUTE_S, RateLimit, show_duration

CALLS = st.lists(
    st.tuples(st.floats(0, 90), st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=60
)


@given(calls=CALLS, per_minute=st.integers(1, 120))
def test_no_span_of_time_gets_more_than_the_limit_and_a_full_bucket(
    calls: list[tuple[float, int, int]], per_minute: int
) -> None:
    now = 0.0
    limit = RateLimit(per_minute, lambda: now)
    taken: list[tuple[float, int]] = []
    for pause, num, debt in calls:
        now += pause
        if limit.wait_s(num) == 0:
            limit.take(num)
            taken.append((now, num))
            limit.take(debt)  # output, which is known only afterwards
            taken.append((now, debt))
        else:
            waits = limit.wait_s(num)
            assert 0 < waits <= limit.reset_s
            now += waits + 1e-6  # what was said suffices
            assert limit.wait_s(num) == 0
        assert limit.level <= per_minute
    for number, (start, _) in enumerate(taken):
        for last in range(number, len(taken)):
            # The last call may overdraw: the next one waits until that is made up for.
            within = sum(num for _, num in taken[number : last + 1]) - taken[last][1]
            allowed = per_minute + (taken[last][0] - start) * per_minute / MINUTE_S
            overdraft = max(num for _, num in taken)
            assert within <= allowed + overdraft + 1e-6


def test_a_call_larger_than_the_limit_waits_for_a_full_bucket() -> None:
    now = 0.0
    limit = RateLimit(60, lambda: now)
    assert limit.wait_s(1000) == 0
    limit.take(1000)
    assert limit.headers("tokens") == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "16m40s",
    }
    now = 941.0
    assert limit.wait_s(1) == 0
    assert limit.wait_s(2) == pytest.approx(1)


def test_anthropics_headers_hold_the_time_at_which_the_bucket_is_full() -> None:
    limit = RateLimit(60, lambda: 0.0)
    limit.take(30)
    headers = limit.anthropic_headers("requests")
    reset = datetime.fromisoformat(headers.pop("anthropic-ratelimit-requests-reset"))

    assert headers == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "30",
    }
    assert timedelta(0) < reset - datetime.now(UTC) <= timedelta(seconds=30)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (2.5, "2.5s"), (60, "1m0s"),
     (59.9996, "1m0s"), (360, "6m0s"), (61.2, "1m2s")],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown
