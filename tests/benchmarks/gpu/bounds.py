"""Measure the device's bounds: its speed of copying and of multiplying.

Other results are reported as a share of these two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COPY_BYTES = 2**32
MATRIX = 8192
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes a second, read and written together, and operations a second in bfloat16."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def parse(cls, written: str) -> Bounds:
        """Return what `written` has written."""
        return cls(*map(float, written.split(",")))

    def written(self) -> str:
        """Return them as one word, for a command line."""
        return f"{self.bytes_per_s},{self.flops_per_s}"


def measure_bounds(device: torch.device) -> Bounds:
    """Copy some GiB and multiply large square matrices; small ones where there is no GPU."""
    is_cuda = device.type == "cuda"
    num_bytes, side = (COPY_BYTES, MATRIX) if is_cuda else (2**22, 256)
    copy_s, product_s = copy_seconds(device, num_bytes), product_seconds(device, side)
    if is_cuda:
        torch.cuda.empty_cache()  # what is measured next needs it
    return Bounds(2 * num_bytes / copy_s, 2 * side**3 / product_s)


def copy_seconds(device: torch.device, num_bytes: int) -> float:
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds_of(lambda: target.copy_(source), device)


def product_seconds(device: torch.device, side: int) -> float:
    """Multiply random numbers: a GPU multiplies ones faster, for they take less power."""
    left, right = torch.randn(2, side, side, dtype=torch.bfloat16, device=device)
    return seconds_of(lambda: left @ right, device)


def seconds_of(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median of the seconds that a call takes on the device, after three warm ones."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(_on_host(run) for _ in range(min(rounds, 3)))
    event: Any = torch.cuda.Event
    starts = [event(enable_timing=True) for _ in range(rounds)]
    ends = [event(enable_timing=True) for _ in range(rounds)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    milliseconds = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    return float(statistics.median(milliseconds)) / 1e3


def _on_host(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
