"""Logs a warning about slow garbage collections, during which nothing else runs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class GcLog:
    """Watches this process's garbage collections until closed."""

    def __init__(self, threshold_s: float) -> None:
        self._threshold_s = threshold_s
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
            return
        seconds = time.perf_counter() - self._started
        if self._started and seconds >= self._threshold_s:
            log.warning(
                "gc: slow collection: generation %s, %.3f s, %s objects freed",
                info.get("generation"),
                seconds,
                info.get("collected"),
            )

    def close(self) -> None:
        """Stop watching."""
        with suppress(ValueError):
            gc.callbacks.remove(self._note)
