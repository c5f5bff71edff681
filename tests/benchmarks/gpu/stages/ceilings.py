"""Ceilings of the device: copying, reading, multiplying, launching, and a node of a graph."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tests.benchmarks.gpu.bounds import Bounds
from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.timing import replayed_s, seconds_of

COPY_BYTES, MATRIX, SIZES = 2**32, 8192, (512, 1024, 2048, 4096, 8192)
TINY_BYTES, TINY_MATRIX, TINY_SIZES = 2**22, 256, (32,)
ROUNDS, LAUNCHES = 20, 1000


def cases(setting: Setting) -> Iterator[Case]:
    about = Row(model="device", what="bounds")
    yield Case(about, lambda: bounds(setting))
    if setting.options.get("only") == "bounds":
        return
    for rows in TINY_SIZES if setting.is_tiny else SIZES:
        yield matmul_case(setting, rows)
    for name, measure in (("launch", launch_s), ("graph node", node_s)):
        about = Row(model="device", what=f"{name} of an empty kernel")
        yield Case(about, partial(host_time, about, measure, setting))


def host_time(about: Row, measure: Callable[[Setting], float], setting: Setting) -> Iterator[Row]:
    yield about.found(measure(setting) * 1e6, "us")


def bounds(setting: Setting) -> Iterator[Row]:
    """Measure the speeds that other results are compared with."""
    device = setting.torch_device
    num_bytes, side = (TINY_BYTES, TINY_MATRIX) if setting.is_tiny else (COPY_BYTES, MATRIX)
    copied_s, read_s = copy_and_read_s(num_bytes, device)
    product_s = median_s(product(side, side, device), device)
    found = Bounds(2 * num_bytes / copied_s, 2 * side**3 / product_s, num_bytes / read_s)
    details = {"bounds": asdict(found), "machine": machine(device)}
    yield Row(model="device", what="copies, read and written", is_headline=True).found(
        found.bytes_per_s / 1e12, "TB/s", details=details
    )
    yield Row(model="device", what="reads").found(found.read_bytes_per_s / 1e12, "TB/s")
    yield Row(model="device", what=f"multiplies {side} x {side}", is_headline=True).found(
        found.flops_per_s / 1e12, "TFLOP/s"
    )


def copy_and_read_s(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a copy, and of a reduction that reads as many bytes."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return (
        median_s(lambda: target.copy_(source), device),
        median_s(source.view(torch.int64).amax, device),
    )


def matmul_case(setting: Setting, rows: int) -> Case:
    """Multiply few and many rows with a large weight."""
    side = TINY_MATRIX if setting.is_tiny else MATRIX
    about = Row(model="device", what=f"multiplies {rows} x {side}")

    def measure() -> Iterator[Row]:
        seconds = median_s(product(rows, side, setting.torch_device), setting.torch_device)
        yield about.found(2 * rows * side**2 / seconds / 1e12, "TFLOP/s")

    return Case(about, measure)


def product(rows: int, side: int, device: torch.device) -> Callable[[], object]:
    """Multiply random numbers: a GPU multiplies ones faster, for they take less power."""
    left = torch.randn(rows, side, dtype=torch.bfloat16, device=device)
    right = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    return lambda: left @ right


def launch_s(setting: Setting) -> float:
    """Return the host's seconds for a launch of torch's smallest kernel."""
    one = torch.zeros(1, device=setting.torch_device)
    for _ in range(100):
        one.add_(1)
    synchronize(setting)
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        one.add_(1)
    seconds = time.perf_counter() - started
    synchronize(setting)
    return seconds / LAUNCHES


def node_s(setting: Setting) -> float:
    """Return the device's seconds for a node of a replayed graph; of a CPU, for a call."""
    one = torch.zeros(1, device=setting.torch_device)
    if setting.is_tiny:
        return launch_s(setting)
    return replayed_s([lambda: one.add_(1)] * 50)


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that a call takes on the device, after three warm ones."""
    for _ in range(3):
        run()
    if device.type == "cuda":
        return statistics.median(seconds_of(run) for _ in range(ROUNDS))
    return statistics.median(_on_host(run) for _ in range(3))


def _on_host(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def synchronize(setting: Setting) -> None:
    """Wait for the GPU."""
    if not setting.is_tiny:
        torch.cuda.synchronize()


def machine(device: torch.device) -> dict[str, Any]:
    """Return the versions and devices that the figures depend on."""
    packages = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor(),
        "memory_bytes": torch.cuda.mem_get_info()[1] if is_cuda else None,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **packages,
    }
