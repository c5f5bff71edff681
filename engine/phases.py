"""Times the phases of start-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from remora.engine.protocols import Fill
from remora.kernels.quantised.weight_kinds import WeightKind


@dataclass(slots=True)
class Phases:
    """Seconds that each phase of start-up took, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's time to phase `name`, without phases nested in it."""
        started, before = time.perf_counter(), sum(self.seconds.values())
        yield
        within = sum(self.seconds.values()) - before
        seconds = time.perf_counter() - started - within
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def timing(self, name: str, load: Fill) -> Fill:
        """Return `load` whose calls are timed as phase `name`."""
        return _TimedFill(load, partial(self.timed, name))


@dataclass(frozen=True, slots=True)
class _TimedFill:
    load: Fill
    timed: Callable[[], AbstractContextManager[None]]

    def __call__(self, names: Collection[str] | None = None) -> None:
        with self.timed():
            self.load(names)

    def quantised(self) -> Set[str]:
        return self.load.quantised()

    def kinds(self, names: Collection[str]) -> dict[str, WeightKind]:
        with self.timed():
            return self.load.kinds(names)

    def skip(self, names: Collection[str]) -> None:
        self.load.skip(names)
