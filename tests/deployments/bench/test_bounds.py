"""Measurement of hardware bounds, also on machines without fast products of a format."""

from __future__ import annotations

import time
from collections.abc import Callable

from remora.deployments.bench.bounds import measure_bounds, rate


def test_products_that_take_long_are_not_tried_larger() -> None:
    asked: list[int] = []

    def product(side: int) -> Callable[[], object]:
        asked.append(side)
        return lambda: time.sleep(0.06 if side > 200 else 0.0)

    operations = rate(product)

    assert asked == [192, 384]
    assert operations < 2 * 384**3 / 0.06


def test_a_rate_is_that_of_the_largest_product() -> None:
    operations = rate(lambda side: lambda: time.sleep(0.01))

    assert 2 * 768**3 / 0.01 < operations < 2 * 1536**3 / 0.01


def test_this_machine_reads_and_multiplies() -> None:
    bounds = measure_bounds(1)

    assert min(bounds.read_gb_s, bounds.read_gb_s_1, bounds.bf16_gflop_s) > 0
