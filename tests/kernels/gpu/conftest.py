"""What triton's interpreter needs, and tensors of a CPU on the way that a GPU's would take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import remora.kernels.dispatch
from tests.kernels.gpu.devices import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def interpreted_bfloat16() -> Iterator[None]:
    """Make triton's interpreter multiply blocks of bfloat16, whose bits it takes for integers."""
    tl = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = builder.create_fp_ext(a, tl.float32), builder.create_fp_ext(b, tl.float32)
        return original(builder, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True)
def dispatched_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dispatching functions choose the kernels also for tensors of a CPU."""
    if INTERPRETED:
        monkeypatch.setattr(remora.kernels.dispatch, "TRITON_DEVICES", frozenset({"cpu", "cuda"}))


@pytest.fixture(autouse=True)
def arithmetic_of_a_gpu() -> Iterator[None]:
    """Overflow and division by zero give infinities and NaN, as on a GPU, and no warnings."""
    with np.errstate(all="ignore"):
        yield
