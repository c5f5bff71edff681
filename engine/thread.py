"""The one thread that builds an engine and then steps it.

A GPU's libraries keep handles and workspaces per thread, so steps must run where memory was
measured and graphs were captured; torch's number of CPU threads is a thread's own, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class EngineThread(threading.Thread):
    """Runs calls one after the other, until the last one has returned."""

    def __init__(self) -> None:
        super().__init__(name="remora-engine", daemon=True)
        self._calls: SimpleQueue[tuple[Callable[[], object], bool]] = SimpleQueue()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the thread; its result or exception is the future's."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # the caller's, whatever it is
                future.set_exception(error)

        self._calls.put((run, False))
        return future

    def end_with(self, function: Callable[[], object] = lambda: None) -> None:
        """Run a last function, which must not raise, and end the thread."""
        self._calls.put((function, True))

    def run(self) -> None:
        """Run the calls. `start` runs this in the thread."""
        is_last = False
        while not is_last:
            function, is_last = self._calls.get()
            function()
