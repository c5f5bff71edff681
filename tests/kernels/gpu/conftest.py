"""What triton's interpreter needs, and tensors of a CPU on the way that a GPU's would take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import remora.kernels.dispatch
from tests.kernels.gpu.devices import DEVICES, INTERPRETED
from tests.kernels.gpu.interpreter import quicken


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Return "cpu" where kernels are interpreted, and "cuda" on a GPU."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def interpreted_bfloat16() -> Iterator[None]:
    """Make triton's interpreter treat bfloat16 as a GPU does.

    It multiplies and subtracts blocks of bfloat16 as the integers that it keeps for them, takes
    other integers for such, and rounds to bfloat16 by leaving bits out, where a GPU takes the
    nearest number, the even one of two. It widens bfloat16's numbers below the normal ones wrongly.
    """
    tl = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original, original_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    by_name = {name: getattr(InterpreterBuilder, name) for name in ("create_fsub", "create_fmul")}

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = builder.create_fp_ext(a, tl.float32), builder.create_fp_ext(b, tl.float32)
        return original(builder, a, b, *rest)

    def rounded(name: str) -> Any:
        def compute(builder: Any, a: Any, b: Any) -> Any:
            if a.dtype.scalar != tl.bfloat16:
                return by_name[name](builder, a, b)
            a, b = builder.create_fp_ext(a, tl.float32), builder.create_fp_ext(b, tl.float32)
            return builder.create_fp_trunc(by_name[name](builder, a, b), tl.bfloat16)

        return compute

    def cast_impl(builder: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            source = original_cast(builder, source, tl.float32)
        if source.dtype.scalar == tl.bfloat16 and dtype.scalar == tl.float32:
            wide = source.data.view(np.uint16).astype(np.uint32) << 16
            return TensorHandle(wide.view(np.float32), tl.float32)
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return original_cast(builder, source, dtype)
        bits = source.data.view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        is_nan = bits & 0x7FFFFFFF > 0x7F800000
        return TensorHandle(np.where(is_nan, 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        for name in by_name:
            patch.setattr(InterpreterBuilder, name, rounded(name))
        patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield


@pytest.fixture(autouse=True)
def dispatched_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dispatching functions choose the kernels also for tensors of a CPU."""
    if INTERPRETED:
        monkeypatch.setattr(remora.kernels.dispatch, "TRITON_DEVICES", frozenset({"cpu", "cuda"}))


@pytest.fixture(autouse=True)
def a_lost_gpu_ends_the_process() -> Iterator[None]:
    """After an illegal address all that a process asks of its GPU fails: xdist starts another."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.stderr.write(f"the GPU is lost: {error}\n")
            os._exit(1)


@pytest.fixture(autouse=True)
def arithmetic_of_a_gpu() -> Iterator[None]:
    """Overflow and division by zero give infinities and NaN, as on a GPU, and no warnings."""
    with np.errstate(all="ignore"):
        yield
