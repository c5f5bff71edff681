"""Kernels on a CPU, by Triton's interpreter: no figures, only whether they run."""

from __future__ import annotations

from dataclasses import replace


def interpret_on_cpu() -> None:
    """Let the kernels have tensors of a CPU, and no more programs than a few."""
    import remora.kernels.dispatch
    from remora.kernels.gpu.attention import decode

    remora.kernels.dispatch.TRITON_DEVICES = frozenset({"cpu"})
    decode.LAUNCHES = {
        arch: {size: replace(launch, programs=8) for size, launch in of_arch.items()}
        for arch, of_arch in decode.LAUNCHES.items()
    }
