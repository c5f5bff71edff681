"""Find and end the processes that a command started through Ray."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

KILL_WAIT_S = 2.0


def shut_down() -> None:
    """Stop Serve and Ray, and kill every process that they started."""
    ray = sys.modules.get("ray")
    if ray is None:
        return
    from ray import serve as ray_serve

    started = children()
    if ray.is_initialized():
        ray_serve.shutdown()
    ray.shutdown()
    # Ray's dashboard and agents may outlive it.
    started += children()
    kill(started)
    if started:
        import psutil  # type: ignore[import-untyped]

        psutil.wait_procs(started, timeout=KILL_WAIT_S)


def children() -> list[Any]:
    """Return all descendants of this process; none if Ray was not imported."""
    if "ray" not in sys.modules:
        return []
    import psutil

    found: list[Any] = psutil.Process().children(recursive=True)
    return found


def kill(processes: list[Any]) -> None:
    """Kill processes, children first: Ray's client aborts this process if its raylet dies."""
    import psutil

    for process in reversed(processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()
