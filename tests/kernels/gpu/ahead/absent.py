"""A GPU that is not here, for which kernels are compiled or their specialisations are recorded.

Import it first, in a process of its own: triton either interprets or compiles for as long as a
process lives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[4]))

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import remora.kernels.dispatch
import remora.kernels.gpu.arch
from remora.kernels.gpu.arch import Arch

Key = tuple[str, str, str]


class AbsentGPU:
    """A driver of triton's for a GPU that can be compiled for, and for nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return self._target


def target_of(arch: Arch) -> GPUTarget:
    if arch is Arch.CDNA:
        return GPUTarget("hip", arch.value, 64)
    return GPUTarget("cuda", int(arch.value.removeprefix("sm_")), 32)


def pretend(arch: Arch, *devices: str) -> None:
    """Let tensors of these torch devices take the way of a GPU's."""
    driver.set_active(AbsentGPU(target_of(arch)))
    remora.kernels.dispatch.TRITON_DEVICES = frozenset(devices)
    for module in arch_users():
        module.arch_of = lambda device: arch


def arch_users() -> Iterator[Any]:
    """Yield every module that asks which GPU a tensor lies on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("remora.kernels.") and hasattr(module, "arch_of"):
            yield module


def record_keys() -> set[Key]:
    """Let launches record what triton would compile for them, without compiling or running it.

    Returns the set that grows: kernel, specialisation of arguments, options. Triton compiles a
    kernel once for each; the binder that computes them is its own.
    """
    keys: set[Key] = set()

    def record(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        binder = kernel.device_caches[0][-1]
        _, specialisation, chosen = binder(*args, **options)
        keys.add((kernel.__name__, str(specialisation), str(sorted(chosen.items()))))

    JITFunction.run = record
    return keys
