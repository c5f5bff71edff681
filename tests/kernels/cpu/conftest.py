"""The native library and teams of threads on it, compiled into the user's cache once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remora.configs.environment import cache_dir
from remora.kernels.cpu.build import (
    InstructionSet,
    best_instruction_set,
    load_library,
    read_cpu_flags,
)
from remora.kernels.cpu.library import Library, Team


def load(instruction_set: InstructionSet | None) -> Library:
    order = list(InstructionSet)
    best = best_instruction_set(read_cpu_flags())
    if instruction_set is not None and order.index(instruction_set) < order.index(best):
        pytest.skip(f"this CPU cannot run {instruction_set} code")
    return Library(load_library(cache_dir() / "kernels", instruction_set=instruction_set))


@pytest.fixture(scope="session")
def library() -> Library:
    """The library that this machine serves with."""
    return load(None)


@pytest.fixture(scope="session")
def team(library: Library) -> Iterator[Team]:
    """Two threads."""
    team = Team(library, 2)
    yield team
    team.close()


@pytest.fixture(scope="session", params=list(InstructionSet))
def each_team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Two threads for every instruction set that this CPU can run."""
    team = Team(load(request.param), 2)
    yield team
    team.close()
