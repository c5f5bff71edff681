"""The watch notices launches whose result depends on the order of programs, and stray addresses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.gpu.devices import interpreted_only
from tests.kernels.gpu.orders.watching import backwards, watched

pytestmark = interpreted_only


def write_one_place(x: tl.tensor) -> None:
    tl.store(x, tl.program_id(0))


def read_the_next(x: tl.tensor) -> None:
    tl.store(x + tl.program_id(0), tl.load(x + tl.program_id(0) + 1))


def write_beyond_the_end(x: tl.tensor) -> None:
    at_4 = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(x + at_4, at_4)


def overflow(x: tl.tensor) -> None:
    tl.store(x + tl.program_id(0) * 2147483647 * 2, 1)


def write_own_places(x: tl.tensor) -> None:
    at_4 = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(x + at_4, tl.load(x + at_4, mask=at_4 < 6) + at_4, mask=at_4 < 6)


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (write_one_place, "1 addresses are written by two programs"),
        (read_the_next, "1 addresses are read by another program"),
        (write_beyond_the_end, "program 0 touches memory of no argument"),
        (overflow, "program 0 touches memory of no argument"),
    ],
)
def test_unsafe_launches_are_found(kernel: Callable[..., None], found: str) -> None:
    x = torch.zeros(6, dtype=torch.int32)

    with pytest.raises(Exception, match=found), watched(backwards):
        triton.jit(kernel)[(2,)](x)


def test_a_safe_launch_runs() -> None:
    x = torch.zeros(6, dtype=torch.int32)

    with watched(backwards) as kernels:
        triton.jit(write_own_places)[(2,)](x)

    assert kernels == ["write_own_places"]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
