"""The tests that need a GPU, by pytest, and each that fails as a row.

Most of their time goes to compiling: they run side by side where pytest-xdist is installed.
Without a GPU one module runs, interpreted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting

ROOT = Path(__file__).parents[4]
FOLDERS = ("tests/kernels/gpu", "tests/engine/graphs")
TINY_FOLDERS = ("tests/kernels/gpu/test_activation.py",)
SIDE_BY_SIDE = 8
SILENCE_S = 130.0


def cases(setting: Setting) -> Iterator[Case]:
    about = Row(model="", what="tests")
    yield Case(about, lambda: run(about, setting), SILENCE_S)


class Reports:
    """A plugin of pytest that passes on what has become of each test."""

    def __init__(self, queue: Queue[Any]) -> None:
        self._queue = queue

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pass on a report: of the test itself, or of a fixture that failed or skipped it."""
        if report.when == "call" or not report.passed:
            self._queue.put(report)


def run(about: Row, setting: Setting) -> Iterator[Row]:
    """Run the tests in a thread; yield a row for each that fails, and counts at the end."""
    reports: Queue[Any] = Queue()
    thread = Thread(target=_pytest, args=(setting, reports), daemon=True)
    thread.start()
    counts: dict[str, int] = {}
    while (report := reports.get()) is not None:
        counts[report.outcome] = counts.get(report.outcome, 0) + 1
        if report.failed:
            text = str(report.longrepr).strip().splitlines()
            said = text[-1][:200] if text else "failed"
            yield Row(model="", what=report.nodeid.rpartition("/")[2][-90:], failure=said)
        elif counts[report.outcome] % 50 == 0:
            yield Row(model="", what=f"{report.outcome} so far").found(
                counts[report.outcome], "tests"
            )
    row = Row(model="", what="tests that failed", is_headline=True, details=dict(counts))
    yield row.found(counts.get("failed", 0), "tests").asking_at_most(0)


def _pytest(setting: Setting, reports: Queue[Any]) -> None:
    import pytest

    os.chdir(ROOT)
    which = [] if setting.is_tiny else ["-m", "gpu"]
    if not setting.is_tiny and find_spec("xdist"):
        which += ["-n", str(SIDE_BY_SIDE)]
    if find_spec("pytest_timeout"):
        which += ["--timeout=120", "--timeout-method=thread"]  # ours is not the main thread
    folders = TINY_FOLDERS if setting.is_tiny else FOLDERS
    try:
        # Warnings of other versions than ours are no errors.
        pytest.main(
            ["-q", "-W", "default", "-p", "no:cacheprovider", *which, *folders],
            plugins=[Reports(reports)],
        )
    finally:
        reports.put(None)
