"""Progress of slow start-up phases: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

LOG_PERIOD_S = 10.0


class _Lines:
    """Logs progress periodically."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._started = self._logged = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._logged >= LOG_PERIOD_S and self._done < self._total:
            self._logged = now
            share = 100 * self._done / self._total
            logger.info("%s: %.0f %% after %.0f s", self._label, share, now - self._started)


@contextmanager
def progress_bar(
    label: str, total: int, show: bool, *, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error; yields the function that advances it.

    If that is not a terminal, log the progress every LOG_PERIOD_S seconds.
    """
    if not show:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        yield _Lines(label, total).advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    of_kind = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *of_kind,
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(label, total=total)
    with bar:
        yield lambda count: bar.advance(task, count)
