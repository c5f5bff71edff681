"""Plans of weights in host memory."""

from __future__ import annotations

from remora.configs.planning.offload_plan import OffloadPlan


def offloaded(*layers: int, prefetch: int = 1, host_bytes: int = 0) -> OffloadPlan:
    """Return a plan for these layers."""
    return OffloadPlan(
        layers=layers,
        prefetch=prefetch,
        host_bytes=host_bytes,
        buffer_bytes=0,
        saved_bytes=(0,),
    )
