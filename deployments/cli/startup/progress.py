"""What a starting server is doing: one line that is rewritten, or a line now and then.

On a terminal the line has the phase and its seconds, and other output appears above it. The cursor
stays at the line's start, so that another process that ends this one writes over it. Elsewhere,
such as in a file or a service's log, a plain line names the phase of a start that takes long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO, cast

TERMINAL_PERIOD_S, PLAIN_PERIOD_S = 0.5, 10.0
_CLEAR = "\x1b[2K"


class _AboveTheLine:
    """A stream of a terminal that removes the line before it writes."""

    def __init__(self, stream: TextIO, lock: threading.RLock) -> None:
        self._stream = stream
        self._lock = lock

    def write(self, text: str) -> int:
        """Write text, over the line if it is at its start."""
        with self._lock:
            return self._stream.write(f"{_CLEAR}{text}" if text.strip() else text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """Reports the phases of a start from a thread, as a context manager.

    stream:    where lines go; default: standard error
    clock:     returns seconds
    period_s:  between lines; default: by the kind of stream
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        period_s: float | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._clock = clock
        self._period_s = period_s or (TERMINAL_PERIOD_S if self._is_terminal else PLAIN_PERIOD_S)
        self._phase, self._began = "", clock()
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._streams = (sys.stdout, sys.stderr)

    def __enter__(self) -> Self:
        """Start to report."""
        self._streams = (sys.stdout, sys.stderr)
        if self._is_terminal:
            sys.stdout, sys.stderr = (self._above(stream) for stream in self._streams)
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Stop reporting."""
        self.close()

    def close(self) -> None:
        """Stop reporting, and remove the line of a terminal. May be called again."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        sys.stdout, sys.stderr = self._streams
        if self._is_terminal:
            self._write(_CLEAR)

    def phase(self, text: str) -> None:
        """Name what begins."""
        with self._lock:
            self._phase, self._began = text, self._clock()
        if self._is_terminal:
            self._show()

    def _run(self) -> None:
        while not self._is_over.wait(self._period_s):
            self._show()

    def _show(self) -> None:
        if not self._phase:
            return
        text = f"starting: {self._phase}, {self._clock() - self._began:.0f} s"
        self._write(f"{_CLEAR}{text}\r" if self._is_terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        with self._lock:
            self._stream.write(text)
            self._stream.flush()

    def _above(self, stream: TextIO) -> TextIO:
        if not stream.isatty():
            return stream
        return cast("TextIO", _AboveTheLine(stream, self._lock))
