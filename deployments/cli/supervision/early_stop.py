"""Signals before a server is supervised: one line and the usual exit code, without a traceback.

This module imports only light modules, because its handlers are to be installed early.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_end_the_process() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once within the block."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, _end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    os.write(2, f"error: stopped by {signal.Signals(number).name} before it started\n".encode())
    os._exit(128 + number)
