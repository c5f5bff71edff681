"""The anonymous memory of this process, and its peak, for benchmarks of loading."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.002


@dataclass(slots=True)
class Peak:
    """The most anonymous memory seen so far, in bytes, and what there was before."""

    before: int
    num_bytes: int = 0

    @property
    def growth(self) -> int:
        """Return how much more than before it was."""
        return self.num_bytes - self.before


@contextmanager
def watched() -> Iterator[Peak]:
    """Look at this process's anonymous memory all the time."""
    peak, done = Peak(anonymous_bytes()), threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak.num_bytes = max(peak.num_bytes, anonymous_bytes())
            time.sleep(SAMPLE_S)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that are no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")
