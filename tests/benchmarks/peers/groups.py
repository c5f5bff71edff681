"""End a process together with its children."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from types import FrameType
from typing import Any

STOP_WITHIN_S = 20.0


def interrupt_on_sigterm() -> None:
    """Make SIGTERM what Ctrl-C is, so that `finally` is reached."""
    signal.signal(signal.SIGTERM, _interrupt)


def stop_group(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, and all that is left of it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
