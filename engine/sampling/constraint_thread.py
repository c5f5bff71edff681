"""A thread for what guides do, left behind when one of them takes too long.

Native code that works out a mask cannot be interrupted. So that the constraint of one row does not
hold up the others, its thread is left: it ends by itself some time, nobody reads what it finds, and
the rest goes on in a new one, with less time for each if there are many such rows. What counts is
processor time, so that a busy machine ends nothing that an idle one finishes. A step that fails, in
whatever way, costs its own row. Knows no masks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from remora.engine.types import MatcherTooSlow, RowFault

logger = logging.getLogger(__name__)

# Processor time of one step. Schemas in use take up to 6 ms with 49,000 tokens; 0.07 ms is usual.
MAX_STEP_S = 0.25
# Of all the steps together, before each of those that are left has the lower limit.
MAX_TOTAL_S = 0.5
LOWER_STEP_S = 0.01
CHECK_S = 0.01
LEFT_NICENESS = 19

Steps = Sequence[tuple[int, Callable[[], object]]]


class ConstraintFailed(Exception):
    """A row cannot go on; the message says why. Others are not concerned."""


class Work:
    """Steps (row, action) to be done one after the other.

    faults:   of the steps so far, by row
    is_done:  set after the last step; never, if the work has been left
    spent_s:  processor time, of the steps before these at first, and of these too once it is left
    """

    def __init__(self, steps: Steps, spent_s: float = 0.0) -> None:
        self.spent_s = spent_s
        self.faults: dict[int, RowFault] = {}
        self.is_done = threading.Event()
        self._steps = steps
        self._num_done = 0
        self._is_left = False
        self._lock = threading.Lock()
        self._clock: int | None = None
        self._started_s = self._began_s = 0.0

    def run(self) -> bool:
        """Do the steps; False if the work was left meanwhile."""
        self._started_s = self._began_s = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        for row, action in self._steps:
            fault = fault_of(action, row)
            with self._lock:
                if self._is_left:
                    return False
                self._num_done += 1
                self._began_s = time.thread_time()
                if fault is not None:
                    self.faults[row] = fault
        self.is_done.set()
        return True

    def leave_if_late(self) -> Steps | None:
        """If the present step has taken too long, leave it; returns the steps after it."""
        with self._lock:
            at = self._num_done
            if self._clock is None or at == len(self._steps):
                return None
            now_s = time.clock_gettime(self._clock)
            took_s, spent_s = now_s - self._began_s, self.spent_s + now_s - self._started_s
            if took_s < (MAX_STEP_S if spent_s < MAX_TOTAL_S else LOWER_STEP_S):
                return None
            self._is_left, self.spent_s = True, spent_s
            reason = f"to tell which token may come next took more than {took_s:.2f} s"
            self.faults[self._steps[at][0]] = RowFault(reason, of_request=True)
            return self._steps[at + 1 :]


class ConstraintThread:
    """Does work in the order in which it was begun. For one caller; starts nothing before it."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Work | None] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, steps: Steps, spent_s: float = 0.0) -> Work:
        """Begin to do steps; the caller goes on. `finish` must follow before the next `begin`.

        spent_s:  processor time that steps before them have taken
        """
        if self._inbox is None:
            self._inbox = SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._inbox,), name="remora-guides", daemon=True
            )
            self._thread.start()
        work = Work(steps, spent_s)
        self._inbox.put(work)
        return work

    def finish(self, work: Work) -> tuple[dict[int, RowFault], bool]:
        """Wait until all steps are done, but those that take too long.

        Returns faults by row, and whether a thread had to be left, which may still write.
        """
        faults: dict[int, RowFault] = {}
        is_left = False
        while not work.is_done.wait(CHECK_S):
            rest = work.leave_if_late()
            if rest is not None:
                logger.warning("a constraint takes too long; its thread is left behind")
                faults |= work.faults
                is_left = True
                self._leave()
                work = self.begin(rest, work.spent_s)
        return faults | work.faults, is_left

    def _leave(self) -> None:
        """Go on without the present thread, which has only what others leave of the processor."""
        if self._thread is not None and self._thread.native_id is not None:
            with suppress(OSError):  # it has ended by now
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, LEFT_NICENESS)
        self._inbox = self._thread = None

    def close(self) -> None:
        """Let the thread end."""
        if self._inbox is not None:
            self._inbox.put(None)


def _serve(inbox: SimpleQueue[Work | None]) -> None:
    while (work := inbox.get()) is not None:
        if not work.run():
            return


def fault_of(action: Callable[[], object], row: int) -> RowFault | None:
    """Do what a guide does for a row; returns why that failed, if it did."""
    try:
        action()
    except ConstraintFailed as reason:
        return RowFault(str(reason))
    except MatcherTooSlow as reason:
        return RowFault(str(reason), of_request=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a constraint's code is not ours; panics are no Exceptions
        logger.exception("the constraint of row %d has failed", row)
        return RowFault(f"its constraint failed: {error}")
    return None
