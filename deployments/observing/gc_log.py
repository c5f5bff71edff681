"""A warning about garbage collections that take long: nothing else runs meanwhile."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class GcLog:
    """Watches the collections of this process until closed."""

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
                "a garbage collection of generation %s took %.3f s and freed %s objects",
                info.get("generation"),
                seconds,
                info.get("collected"),
            )

    def close(self) -> None:
        """Watch no longer."""
        with suppress(ValueError):
            gc.callbacks.remove(self._note)
