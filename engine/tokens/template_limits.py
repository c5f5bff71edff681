"""What one rendering of a chat template may take: time, and what its steps make.

Memory is kept by two rules. Before a step that can make much of little its result is reckoned, from
above, and refused when no chat could need it. After every step what it made is taken from what the
rendering as a whole may make, whether or not the template keeps it. Knows nothing of Jinja.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from sys import getsizeof
from typing import Any

# A reckoned step may be this many times the text that may come out: it is reckoned from above.
STEP_CHARS_PER_CHAR, STEP_CHARS = 8, 2**14
# Texts are made some ten times over on their way through a template, and small ones have overheads.
BYTES_PER_CHAR, BYTES = 64, 2**24
MAX_INT_BITS = 4096
# The clock is looked at after so much work, of which a step is at least so much.
WORK_BETWEEN_LOOKS, WORK_OF_STEP = 2**16, 2**9
TEXTS = (str, bytes)
VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
COLLECTIONS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, range, *VIEWS)
# Of a number within a list, written as text.
NUMBER_CHARS = 24


class OverRenderLimit(ValueError):
    """A rendering that was given up. `limit` is the key of the configuration."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class Allowance:
    """What is left of one rendering's time and room.

    max_seconds:  of the thread's own time: waiting for a busy machine costs nobody an answer
    max_chars:    that may come out
    held:         tells what an object that is none of Python's own holds for a template to read
    """

    def __init__(
        self,
        max_seconds: float,
        max_chars: int,
        held: Callable[[Any], Iterable[Any]] = lambda _: (),
    ) -> None:
        self._held = held
        self._max_seconds = max_seconds
        self._deadline = time.thread_time() + max_seconds
        self._max_step_chars = STEP_CHARS_PER_CHAR * max_chars + STEP_CHARS
        self._bytes_left = BYTES_PER_CHAR * max_chars + BYTES
        self._work = 0

    def expect(self, num_chars: int, step: str) -> None:
        """Raise OverRenderLimit if a step that may make `num_chars` may not be taken."""
        self._check_step(num_chars, step)
        self._spend(num_chars)

    def take(self, num_bytes: int) -> None:
        """Count what a step made. Raises OverRenderLimit when it is too much in all."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise _too_much("its steps make too much, all together")
        self._spend(num_bytes)

    def take_made(self, value: Any) -> Any:
        """Count the result of a call, a list with its items; return it."""
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise _too_much(f"it makes a number of more than {MAX_INT_BITS} bits")
        num_bytes = getsizeof(value)
        if isinstance(value, list | tuple):
            num_bytes += sum(map(getsizeof, value))
        self.take(num_bytes)
        return value

    def size(self, value: Any, step: str) -> int:
        """Return how long `value` is as text, indented by one, from above but for escapes.

        A list that holds another one often counts it as often. Raises OverRenderLimit.
        """
        if isinstance(value, str):
            return len(value)
        num_chars = 0
        waiting: list[tuple[Any, int]] = [(value, 0)]
        while waiting:
            item, depth = waiting.pop()
            if isinstance(item, TEXTS):
                num_chars += len(item)
            elif isinstance(item, COLLECTIONS):
                num_chars += (4 + depth) * (1 + len(item))
                self._check_step(num_chars, step)
                if isinstance(item, dict):
                    waiting += [(key, depth) for key in item]
                    item = item.values()
                elif isinstance(item, range):
                    num_chars += NUMBER_CHARS * len(item)
                    continue
                waiting += [(inner, depth + 1) for inner in item]
            elif isinstance(item, int):
                num_chars += NUMBER_CHARS + item.bit_length() // 3
            else:
                num_chars += NUMBER_CHARS
                self._check_step(num_chars, step)
                waiting += [(inner, depth + 1) for inner in self._held(item)]
        self._check_step(num_chars, step)
        self._spend(num_chars)
        return num_chars

    def _check_step(self, num_chars: int, step: str) -> None:
        if num_chars > self._max_step_chars:
            raise _too_much(f"{step!r} could make more than {self._max_step_chars} characters")

    def _spend(self, work: int) -> None:
        self._work += work + WORK_OF_STEP
        if self._work < WORK_BETWEEN_LOOKS:
            return
        self._work = 0
        if time.thread_time() > self._deadline:
            raise OverRenderLimit(
                f"it takes more than {self._max_seconds:g} s", "template_timeout_s"
            )


def _too_much(words: str) -> OverRenderLimit:
    return OverRenderLimit(words, "max_template_chars")


# Of the rendering that this thread is at.
allowance: ContextVar[Allowance] = ContextVar("allowance")
