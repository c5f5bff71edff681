"""Some of many cases that are alike: `make test` tries these, `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Return all cases for `parametrize`; but for the first of every so many they are marked slow.

    Where the cases' kinds take turns, a step that shares no divisor with the number of kinds
    keeps some of each.
    """
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if number % every else [])
        for number, case in enumerate(cases)
    ]
