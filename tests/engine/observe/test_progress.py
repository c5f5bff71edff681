"""Where nobody looks at a terminal, progress is in the log."""

from __future__ import annotations

import logging

import pytest

from remora.engine.observe import progress


def test_progress_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("remora.engine.observe.progress.time.monotonic", lambda: now)
    with (
        caplog.at_level(logging.INFO, progress.__name__),
        progress.progress_bar("Loading it", 200, show=True) as advance,
    ):
        advance(10)
        now += progress.LOG_PERIOD_S
        advance(40)
        advance(50)
        now += progress.LOG_PERIOD_S
        advance(50)

    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Loading it: 25 % after 10 s", "Loading it: 75 % after 20 s"]


def test_nothing_is_said_where_nothing_is_to_be_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LOG_PERIOD_S", 0.0)

    with (
        caplog.at_level(logging.INFO, progress.__name__),
        progress.progress_bar("Loading it", 2, show=False) as advance,
    ):
        advance(1)

    assert not caplog.records
