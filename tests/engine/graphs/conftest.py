"""The native library, compiled into the user's cache once.

All tests use the one that this machine serves with, and, among the slow tests, every fifth one also
each other that it can run: `tests/kernels/cpu` tries all operations with all of them.
"""

from __future__ import annotations

from zlib import crc32

import pytest

from remora.configs.environment import cache_dir
from remora.kernels.cpu.build import (
    InstructionSet,
    best_instruction_set,
    load_library,
    read_cpu_flags,
)
from remora.kernels.cpu.library import Library

SHARE = 5
ORDER = list(InstructionSet)
BEST = best_instruction_set(read_cpu_flags())
OTHERS = [
    pytest.param(each, marks=pytest.mark.slow, id=each) for each in ORDER[ORDER.index(BEST) + 1 :]
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what other instruction sets do not try."""

    def is_tried(item: pytest.Item) -> bool:
        given = getattr(item, "callspec", None)
        chosen = given.params.get("library") if given else None
        return chosen is None or crc32(item.nodeid.encode()) % SHARE == 0

    items[:] = filter(is_tried, items)


@pytest.fixture(scope="session", params=[pytest.param(None, id="best"), *OTHERS])
def library(request: pytest.FixtureRequest) -> Library:
    """The library that this machine serves with, or one of another instruction set."""
    return Library(load_library(cache_dir() / "kernels", instruction_set=request.param))
