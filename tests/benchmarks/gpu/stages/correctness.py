"""Kernels at real shapes: the same bits twenty times, and torch's results in float32.

A result is compared by its greatest error, in units of the tolerance: the mean size of what is
expected and its own size, times TOLERANCE. Integers (tokens, experts) are compared as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.cases import real_shapes
from tests.benchmarks.gpu.interpreted import interpret_on_cpu
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.stages.kernels import checked_cases
from tests.benchmarks.gpu.timing import Call, KernelCase

# Weights, sums and results are rounded to 8 bits each; errors of many elements spread.
TOLERANCE = 3e-2
# Of tokens and experts: where sums or scores are as good as equal, rounding decides.
MAX_OTHER_SHARE = 0.01
TIMES, TINY_TIMES = 20, 2


def cases(setting: Setting) -> Iterator[Case]:
    torch.backends.cuda.matmul.allow_tf32 = False
    if setting.is_tiny:
        interpret_on_cpu()
    for case in (*real_shapes.cases(tiny=setting.is_tiny), *checked_cases(tiny=setting.is_tiny)):
        about = Row(model=case.model, what=f"{case.kernel} {case.shape}")
        yield Case(about, partial(check, case, about, setting), 60.0)


def check(case: KernelCase, about: Row, setting: Setting) -> Iterator[Row]:
    """Compare a kernel with itself and with torch; cases without an expectation are passed over."""
    torch.manual_seed(0)
    call = case.make(setting.torch_device, setting.dtype)
    if call.expected is None:
        return
    first = call.computed().clone()
    times = TINY_TIMES if setting.is_tiny else TIMES
    num_other = sum(not same_bits(first, call.computed()) for _ in range(times - 1))
    error, unit = greatest_error(call, first)
    most = 1.0 if first.is_floating_point() else MAX_OTHER_SHARE
    row = about.found(error, unit).asking_at_most(most)
    yield replace(
        row,
        ok=bool(row.ok) and num_other == 0,
        asked=f"{row.asked}, same bits {times} times",
        details={"runs_with_other_bits": num_other},
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are equal, NaN included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def greatest_error(call: Call, result: Tensor) -> tuple[float, str]:
    """Return the greatest error in units of the tolerance, or the share of other integers."""
    assert call.expected is not None
    worst, num_other = 0.0, 0
    for got, want in call.expected(result):
        if not want.is_floating_point():
            num_other += int((got != want).sum())
            continue
        want = want.float()
        allowed = TOLERANCE * (want.abs().mean() + want.abs())
        error = ((got.float() - want).abs() / allowed).nan_to_num(torch.inf).max()
        worst = max(worst, float(error))
    if result.is_floating_point():
        return worst, "tolerance"
    return num_other / result.numel(), "other"
