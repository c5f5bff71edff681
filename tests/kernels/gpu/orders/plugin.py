"""Runs the programs of all tests in another order and watches them.

python -m pytest -p tests.kernels.gpu.orders.plugin tests/kernels/gpu
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.gpu.orders.watching import shuffled, watched


@pytest.fixture(autouse=True)
def programs_in_another_order() -> Iterator[None]:
    with watched(shuffled):
        yield
