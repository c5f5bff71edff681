"""The native library, compiled into the user's cache once."""

from __future__ import annotations

import pytest

from remora.configs.environment import cache_dir
from remora.kernels.cpu.build import (
    InstructionSet,
    best_instruction_set,
    load_library,
    read_cpu_flags,
)
from remora.kernels.cpu.library import Library

OTHERS = [pytest.param(each, marks=pytest.mark.slow, id=each) for each in InstructionSet]


@pytest.fixture(scope="session", params=[pytest.param(None, id="best"), *OTHERS])
def library(request: pytest.FixtureRequest) -> Library:
    """The library that this machine serves with; among the slow tests, every one that it runs."""
    order = list(InstructionSet)
    best = best_instruction_set(read_cpu_flags())
    if request.param is not None and order.index(request.param) <= order.index(best):
        pytest.skip(f"{request.param} is this CPU's best, or more than it can run")
    return Library(load_library(cache_dir() / "kernels", instruction_set=request.param))
