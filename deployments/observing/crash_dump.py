"""Writes the requests of the last minutes to a file when the engine fails.

Each line is a JSON object of text and numbers, so that reading a dump never executes anything.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.deployments.observing.json_lines import as_json, non_default
from remora.deployments.observing.request_trace import RequestTrace

log = logging.getLogger(__name__)

WINDOW_S = 300.0
MAX_REQUESTS = 10_000


class CrashDump:
    """Records requests, and writes them. Raises ConfigError if it cannot create the folder.

    name:  the replica's name
    """

    is_on = True

    def __init__(
        self, folder: Path, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"debug.crash_dump_dir: {folder}: {error.strerror}") from None
        self._folder = folder
        self._name = name
        self._clock = clock
        self._running: dict[int, RequestTrace] = {}
        self._ended: deque[tuple[float, RequestTrace]] = deque(maxlen=MAX_REQUESTS)

    def begun(self, trace: RequestTrace) -> None:
        """Record a request."""
        self._running[id(trace)] = trace

    def ended(self, trace: RequestTrace) -> None:
        """Keep an ended request for `WINDOW_S`."""
        del self._running[id(trace)]
        self._ended.append((self._clock(), trace))
        self._drop_old()

    def _drop_old(self) -> None:
        since = self._clock() - WINDOW_S
        while self._ended and self._ended[0][0] < since:
            self._ended.popleft()

    def write(self, reason: Exception) -> None:
        """Write all recorded requests to a file that only this user may read."""
        self._drop_old()
        traces = [*(trace for _, trace in self._ended), *self._running.values()]
        path = self._folder / f"crash-{self._name}-{int(time.time())}.jsonl"
        lines = [{"reason": str(reason)}, *map(_line, traces)]
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for line in lines:
                    file.write(as_json(line) + b"\n")
        except OSError as error:
            log.error("crash dump: writing failed: %s", error)
        else:
            log.error("crash dump: wrote %d requests to %s", len(traces), path)


def _line(trace: RequestTrace) -> dict[str, Any]:
    return {
        "rid": trace.rid,
        "started_at": trace.started_at,
        "whole_s": trace.whole_s,
        "error": trace.error,
        "requests": [
            {
                "prompt_ids": list(request.shown_ids),
                "adapter": request.lora_id,
                "sampling": non_default(request.sampling),
            }
            for request in trace.requests
        ],
        "answers": [
            {
                "prompt": prompt,
                "index": index,
                "text": sequence.text,
                "num_tokens": sequence.num_tokens,
                "finish_reason": sequence.finish_reason,
            }
            for (prompt, index), sequence in trace.sequences.items()
        ],
    }
