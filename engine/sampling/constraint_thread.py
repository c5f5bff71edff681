"""The thread that runs constraints, abandoned when one of them takes too long.

Native code that computes a mask cannot be interrupted. So that one row's constraint does not hold
up the others, its thread is abandoned: it ends by itself, its results are discarded, and a new
thread runs the rest, with less time for each if many rows are slow. Limits are processor time, so
a busy machine ends nothing that an idle one finishes. A step that fails, in any way, costs its own
row. Knows no masks.
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
# Processor time of all steps together, after which each remaining step has the lower limit.
MAX_TOTAL_S = 0.5
LOWER_STEP_S = 0.01
CHECK_S = 0.01
ABANDONED_NICENESS = 19

# Each has a name: the row that cannot go on without it, or ~row if only its drafts cannot.
Steps = Sequence[tuple[int, Callable[[], object]]]


class ConstraintFailed(Exception):
    """A row's constraint cannot continue; the message is the reason. Other rows continue."""


class Work:
    """Steps (name, action) that run one after the other.

    faults:   of finished steps, by name
    is_done:  set after the last step; never, if the work is abandoned
    spent_s:  processor time of earlier steps, and of these too once the work is abandoned
    """

    def __init__(self, steps: Steps, spent_s: float = 0.0) -> None:
        self.spent_s = spent_s
        self.faults: dict[int, RowFault] = {}
        self.is_done = threading.Event()
        self._steps = steps
        self._num_done = 0
        self._is_abandoned = False
        self._lock = threading.Lock()
        self._clock: int | None = None
        self._started_s = self._began_s = 0.0

    def run(self) -> bool:
        """Run the steps; returns False if the work was abandoned meanwhile."""
        self._started_s = self._began_s = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        for name, action in self._steps:
            fault = fault_of(action, max(name, ~name))
            with self._lock:
                if self._is_abandoned:
                    return False
                self._num_done += 1
                self._began_s = time.thread_time()
                if fault is not None:
                    self.faults[name] = fault
        self.is_done.set()
        return True

    def abandon_if_late(self) -> Steps | None:
        """If the current step has taken too long, abandon the work; returns what is left to do.

        These are the steps after it, but no other of its row, whose constraint it still holds.
        """
        with self._lock:
            at = self._num_done
            if self._clock is None or at == len(self._steps):
                return None
            now_s = time.clock_gettime(self._clock)
            took_s, spent_s = now_s - self._began_s, self.spent_s + now_s - self._started_s
            if took_s < (MAX_STEP_S if spent_s < MAX_TOTAL_S else LOWER_STEP_S):
                return None
            self._is_abandoned, self.spent_s = True, spent_s
            reason = f"finding the tokens that its constraint allows took more than {took_s:.2f} s"
            name = self._steps[at][0]
            self.faults[name] = RowFault(reason, of_request=True)
            return [step for step in self._steps[at + 1 :] if step[0] != ~name]


class ConstraintThread:
    """Runs work in order, for one caller. The thread starts with the first work."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Work | None] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, steps: Steps, spent_s: float = 0.0) -> Work:
        """Start to run steps; `finish` must follow before the next `begin`.

        spent_s:  processor time of earlier steps
        """
        if self._inbox is None:
            self._inbox = SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._inbox,), name="remora-constraints", daemon=True
            )
            self._thread.start()
        work = Work(steps, spent_s)
        self._inbox.put(work)
        return work

    def finish(self, work: Work) -> tuple[dict[int, RowFault], bool]:
        """Wait for all steps, except slow ones.

        Returns faults by name, and whether a thread was abandoned, which may still write.
        """
        faults: dict[int, RowFault] = {}
        is_abandoned = False
        while not work.is_done.wait(CHECK_S):
            rest = work.abandon_if_late()
            if rest is not None:
                logger.warning("constraints: a row's constraint takes too long; thread abandoned")
                faults |= work.faults
                is_abandoned = True
                self._abandon()
                work = self.begin(rest, work.spent_s)
        return faults | work.faults, is_abandoned

    def _abandon(self) -> None:
        """Continue without the current thread, at the lowest priority."""
        if self._thread is not None and self._thread.native_id is not None:
            with suppress(OSError):  # the thread has ended
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, ABANDONED_NICENESS)
        self._inbox = self._thread = None

    def close(self) -> None:
        """End the thread once its work is done."""
        if self._inbox is not None:
            self._inbox.put(None)


def _serve(inbox: SimpleQueue[Work | None]) -> None:
    while (work := inbox.get()) is not None:
        if not work.run():
            return


def fault_of(action: Callable[[], object], row: int) -> RowFault | None:
    """Run a row's constraint; returns why it failed, if it did."""
    try:
        action()
    except ConstraintFailed as reason:
        return RowFault(str(reason))
    except MatcherTooSlow as reason:
        return RowFault(str(reason), of_request=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # third-party code; Rust panics are not Exceptions
        logger.exception("constraints: the constraint of row %d failed", row)
        return RowFault(f"its constraint failed: {error}")
    return None
