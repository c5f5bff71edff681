"""`remora compile`: compile the native CPU kernels ahead of the first start."""

from __future__ import annotations

import time

from remora.configs.environment import cache_dir
from remora.deployments.cli.terminal import Failure, answer

KERNELS = "kernels"  # the folder of compiled libraries in the cache


def compile_kernels() -> None:
    """Compile the native CPU kernels for this machine, unless they are in the cache."""
    from remora.kernels.cpu.build import NativeUnavailable, build_library

    started = time.perf_counter()
    try:
        library = build_library(cache_dir() / KERNELS)
    except NativeUnavailable as reason:
        raise Failure(f"cannot build the native kernels: {reason}") from reason
    answer(f"{library} ({time.perf_counter() - started:.1f} s)")
