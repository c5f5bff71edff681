"""Limits of rendering one chat template: time, and memory that its operations create.

Two rules bound memory. Before an operation that can create much from little, its result size is
estimated from above, and refused if no chat could need it. After every operation, the size of its
result is deducted from the budget of the rendering, whether or not the template keeps it. Knows
nothing of Jinja.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from sys import getsizeof
from typing import Any

# An estimated operation may create this multiple of the allowed output, since it is an upper bound.
STEP_CHARS_PER_CHAR, STEP_CHARS = 8, 2**14
# Texts are created about ten times over in a template, and small ones have overheads.
BYTES_PER_CHAR, BYTES = 64, 2**24
MAX_INT_BITS = 4096
# The clock is checked after this much work, of which an operation is at least this much.
WORK_BETWEEN_LOOKS, WORK_OF_STEP = 2**16, 2**9
TEXTS = (str, bytes)
VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
COLLECTIONS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, range, *VIEWS)
# Of a number within a list, written as text.
NUMBER_CHARS = 24


class OverRenderLimit(ValueError):
    """A rendering that was aborted. `limit` is the configuration key."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class Allowance:
    """The remaining time and memory of one rendering.

    max_seconds:  of the thread's own time: a busy machine does not abort renderings
    max_chars:    of the output
    held:         returns what a non-builtin object holds for a template to read
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
        """Raise OverRenderLimit if creating `num_chars` characters exceeds the limit."""
        self._check_step(num_chars, step)
        self._spend(num_chars)

    def take(self, num_bytes: int) -> None:
        """Count the result of an operation. Raises OverRenderLimit if the total is too large."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise _too_much("its operations create too much in total")
        self._spend(num_bytes)

    def take_made(self, value: Any) -> Any:
        """Count the result of a call, a list with its items; return it."""
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise _too_much(f"it creates a number of more than {MAX_INT_BITS} bits")
        num_bytes = getsizeof(value)
        if isinstance(value, list | tuple):
            num_bytes += sum(map(getsizeof, value))
        self.take(num_bytes)
        return value

    def size(self, value: Any, step: str) -> int:
        """Return an upper bound of the length of `value` as indented text, without escapes.

        A list that contains another one repeatedly counts it as often. Raises OverRenderLimit.
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
            raise _too_much(f"{step!r} could create more than {self._max_step_chars} characters")

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


# Of the rendering that runs in this thread.
allowance: ContextVar[Allowance] = ContextVar("allowance")
