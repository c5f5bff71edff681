"""Where the device's time goes: seconds of each kernel, and the share in which none runs."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """A profile, summarised.

    kernels:     (name, calls, microseconds), the longest first
    span_us:     from the first kernel's begin to the last one's end
    idle_share:  of the span, in which no kernel runs
    """

    kernels: list[tuple[str, int, float]]
    span_us: float
    idle_share: float

    def write(self, path: Path) -> None:
        """Write a table of kernels, with shares of the span."""
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["kernel", "calls", "us", "share of the span"])
            for name, calls, us in self.kernels:
                table.writerow([name[:160], calls, f"{us:.1f}", f"{us / self.span_us:.4f}"])
            table.writerow(["(idle)", "", "", f"{self.idle_share:.4f}"])


def trace(run: Callable[[], object], device: torch.device) -> Trace:
    """Profile a call; on a CPU operations stand for kernels."""
    is_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        run()
        if is_cuda:
            torch.cuda.synchronize()
    wanted = "CUDA" if is_cuda else "CPU"
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or []
        if event.device_type.name == wanted
    ]
    return summarise(events)


def summarise(events: Iterable[tuple[str, float, float]]) -> Trace:
    """Return times by name, and the share of the span that no event covers.

    events:  (name, begin, end) in microseconds
    """
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    intervals: list[Interval] = []
    for name, begin, end in events:
        calls[name] += 1
        seconds[name] += end - begin
        intervals.append((begin, end))
    if not intervals:
        raise RuntimeError("the profiler saw no kernels")
    span = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    kernels = sorted(((name, calls[name], us) for name, us in seconds.items()), key=lambda k: -k[2])
    return Trace(kernels, span, 1 - covered(intervals) / max(span, 1e-9))


def covered(intervals: Iterable[Interval]) -> float:
    """Return how much intervals cover together."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
