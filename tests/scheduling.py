"""What `make test` runs in one of its processes, and in which order (pytest-xdist).

Every module is run as a whole, for the sake of its fixtures, and those with a Ray are run as one:
servers take both cores when they start, and two at a time would be slow enough to be given up. That
group begins first, since it is the longest; then come the slow modules, and the many quick ones
last, so that both processes end together.

Groups by marks (`--dist loadgroup`) would say the same. But xdist 3.8 writes them into node ids,
which pytest 9.2 does not let it do any more, and then it scatters the tests without a word.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]


class ModuleScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process one module after the other, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        module = module_of(nodeid)
        return "ray" if "ray" in marks_of(module) else module


def in_order(items: list[pytest.Item]) -> None:
    """Sort tests as they are to be begun."""

    def place(item: pytest.Item) -> int:
        marks = marks_of(module_of(item.nodeid))
        return 0 if "ray" in marks else 1 if "slow" in marks else 2

    items.sort(key=place)


def module_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@cache
def marks_of(module: str) -> frozenset[str]:
    """Return which of our marks a module has. Whoever schedules has seen names of tests only."""
    text = (ROOT / module).read_text(encoding="utf-8")
    return frozenset(mark for mark in ("ray", "slow") if f"pytest.mark.{mark}" in text)
