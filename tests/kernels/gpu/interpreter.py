"""Triton's interpreter, made quicker."""

from __future__ import annotations

from typing import Any

import pytest


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Let a function that kernels call, tl.sum as well as ours, prepare the language only once.

    The interpreter puts its own operations in the place of the language's at every such call, which
    takes longer than the call does. It does so at each launch anyway, and what it does for a
    function it never undoes.
    """
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.__call__
    prepared: set[Any] = set()

    def call(function: Any, *args: Any, **options: Any) -> Any:
        if function.fn not in prepared:
            prepared.add(function.fn)
            return original(function, *args, **options)
        return function.rewrite()(*args, **options)

    patch.setattr(InterpretedFunction, "__call__", call)
