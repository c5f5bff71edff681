"""Measure the hardware bounds: memory bandwidth and matrix multiplication. Takes 2 seconds.

Measure them within the same minute as the benchmark, because shared machines vary over time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from remora.deployments.bench.roofline import Bounds
from remora.deployments.bench.stats import percentile

SECONDS_EACH = 0.35
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_MIN_BYTES, _MAX_BYTES = 256 * 2**20, 1024 * 2**20
# Sides of the matrices: the first whose product takes longer than _LONG_S is used.
_SIDES = (192, 384, 768, 1536)
_LONG_S = 0.05


def measure_bounds(num_threads: int) -> Bounds:
    """Measure the bounds, and restore torch's number of threads."""
    before = torch.get_num_threads()
    try:
        # Not zeros: the kernel maps untouched zeros to one page, which stays in the cache.
        numbers = torch.ones(_array_bytes() // 8, dtype=torch.int64)
        torch.set_num_threads(1)
        read_1 = numbers.nbytes / _typical_seconds(numbers.sum)
        torch.set_num_threads(num_threads)
        read = numbers.nbytes / _typical_seconds(numbers.sum)
        return Bounds(
            num_threads=num_threads,
            read_gb_s_1=read_1 / 1e9,
            read_gb_s=max(read, read_1) / 1e9,
            bf16_gflop_s=rate(_bf16_product) / 1e9,
            int8_gop_s=_int8_rate(),
        )
    finally:
        torch.set_num_threads(before)


def rate(product: Callable[[int], Callable[[], object]]) -> float:
    """Return the operations per second of products of square matrices.

    The size is limited by time: a CPU without support for a number format is 100 times slower.
    product:  takes the side of the matrices, returns a function that multiplies them
    """
    for side in _SIDES:
        multiply = product(side)
        multiply()
        started = time.perf_counter()
        multiply()
        if time.perf_counter() - started > _LONG_S:
            break
    return 2 * side**3 / _typical_seconds(multiply)


def _bf16_product(side: int) -> Callable[[], object]:
    matrix = torch.ones(side, side, dtype=torch.bfloat16)
    return lambda: matrix @ matrix


def _int8_product(side: int) -> Callable[[], object]:
    matrix = torch.ones(side, side, dtype=torch.int8)
    return lambda: torch._int_mm(matrix, matrix)


def _int8_rate() -> float | None:
    try:
        return rate(_int8_product) / 1e9
    except (AttributeError, RuntimeError):
        return None


def _typical_seconds(call: Callable[[], object]) -> float:
    """Return the 20th percentile of the durations of calls within SECONDS_EACH.

    The median includes the load of other processes; the minimum may have read from the cache.
    """
    call()
    times: list[float] = []
    ends = time.perf_counter() + SECONDS_EACH
    while len(times) < 3 or time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return percentile(times, 20)


def _array_bytes() -> int:
    """Return a size much larger than the last-level cache."""
    try:
        cache_bytes = int(_CACHE_SIZE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        cache_bytes = 0
    return min(max(16 * cache_bytes, _MIN_BYTES), _MAX_BYTES)
