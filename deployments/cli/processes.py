"""The processes that a command has started by way of Ray, and their end."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

KILL_WAIT_S = 2.0


def shut_down() -> None:
    """End Serve, Ray and whatever they have started."""
    ray = sys.modules.get("ray")
    if ray is None:
        return
    from ray import serve as ray_serve

    started = children()
    if ray.is_initialized():
        ray_serve.shutdown()
    ray.shutdown()
    # Ray's dashboard and agents outlive it by a while, or for good.
    started += children()
    kill(started)
    wait_for(started)


def children() -> list[Any]:
    """Return the processes that we started, and those that they did."""
    if "ray" not in sys.modules:
        return []
    import psutil  # type: ignore[import-untyped]

    found: list[Any] = psutil.Process().children(recursive=True)
    return found


def kill(processes: list[Any]) -> None:
    """Kill processes, the outermost last: Ray's client aborts us when its raylet dies."""
    import psutil

    for process in reversed(processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for(processes: list[Any]) -> None:
    """Wait a moment until processes have ended."""
    import psutil

    psutil.wait_procs(processes, timeout=KILL_WAIT_S)
