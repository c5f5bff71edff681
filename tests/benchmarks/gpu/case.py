"""A case of a stage: what is measured, within how many seconds, and a value made once for several.

Knows no process: `worker.py` goes through cases, and `workers.py` ends those that take too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tests.benchmarks.gpu.rows import Row

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a stage.

    about:    what is known of its rows; reported with the reason if the case does not end
    measure:  yields rows
    seconds:  after which a case without a further row is ended
    """

    about: Row
    measure: Callable[[], Iterator[Row]]
    seconds: float = 60.0


class Once(Generic[T]):
    """Makes a value at the first call; a failure is raised again rather than repeated."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []
        self._failure: Exception | None = None

    def __call__(self) -> T:
        if self._failure is not None:
            raise RuntimeError(f"not made: {self._failure}")
        if not self._made:
            try:
                self._made.append(self._make())
            except Exception as error:
                self._failure = error
                raise
        return self._made[0]
