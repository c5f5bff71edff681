"""Measuring what this machine can do: reading memory and multiplying matrices. Takes 2 seconds.

Run in the same minute as what it is compared with: the machine of a minute ago was another one.
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
# Sides of the matrices: the largest of which one product does not take LONG_S.
_SIDES = (192, 384, 768, 1536)
_LONG_S = 0.05


def measure_bounds(num_threads: int) -> Bounds:
    """Measure; torch's number of threads is as before afterwards."""
    before = torch.get_num_threads()
    try:
        # Ones: untouched zeros are one page of the kernel's, which the cache holds.
        halves = torch.ones(2, _array_bytes() // 8)
        torch.set_num_threads(1)
        read_1 = halves.nbytes / _usual_seconds(lambda: halves[0] @ halves[1])
        torch.set_num_threads(num_threads)
        read = halves.nbytes / _usual_seconds(lambda: halves[0] @ halves[1])
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
    """Return the operations a second of products of matrices as large as is worth waiting for.

    A CPU that lacks a number format takes a hundred times as long.
    product:  given the side of two square matrices, returns what multiplies them
    """
    for side in _SIDES:
        multiply = product(side)
        multiply()
        started = time.perf_counter()
        multiply()
        if time.perf_counter() - started > _LONG_S:
            break
    return 2 * side**3 / _usual_seconds(multiply)


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


def _usual_seconds(call: Callable[[], object]) -> float:
    """Return what the quickest fifth of the calls within SECONDS_EACH stays under.

    Not the median, which is what others leave over; not the shortest, which may have found much of
    the array still cached.
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
    """Return a size of which the last-level cache holds but a small part."""
    try:
        cache_bytes = int(_CACHE_SIZE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        cache_bytes = 0
    return min(max(16 * cache_bytes, _MIN_BYTES), _MAX_BYTES)
