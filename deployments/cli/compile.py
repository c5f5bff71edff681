"""`remora compile`: make the native CPU kernels now, and not when the first model starts."""

from __future__ import annotations

import time

from remora.configs.environment import cache_dir
from remora.deployments.cli.terminal import Failure, answer

KERNELS = "kernels"  # the folder of compiled libraries in the cache


def compile_kernels() -> None:
    """Compile the native kernels for this machine; done already, it takes no time."""
    from remora.kernels.cpu.build import NativeUnavailable, build_library

    started = time.perf_counter()
    try:
        library = build_library(cache_dir() / KERNELS)
    except NativeUnavailable as reason:
        raise Failure(f"there are no native kernels: {reason}") from reason
    answer(f"{library} ({time.perf_counter() - started:.1f} s)")
