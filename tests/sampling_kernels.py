"""The implementations of sampling by name, for tests that hold for each of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from remora.configs.environment import cache_dir
from remora.engine.sampling.token_sampler import SamplingKernels
from remora.kernels import sampling as torch_kernels
from remora.kernels.cpu.build import InstructionSet, NativeUnavailable, load_library
from remora.kernels.cpu.library import Library, Team
from remora.kernels.cpu.sampling import NativeSampling

NAMES = ("torch", "native")


def sampling_kernels(name: str) -> SamplingKernels:
    """Return the kernels of a name; skips the test where native ones cannot be had."""
    return torch_kernels if name == "torch" else native_sampling()


def racing_times(
    keys: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the time [N, V] of each weight [V] or [N, V] in the races of keys [N]."""

    def mixed(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    halves = np.ascontiguousarray(keys).view(np.uint32).reshape(-1, 2)
    ids = np.arange(weights.shape[-1], dtype=np.uint32) * np.uint32(0x9E3779B1)
    bits = mixed(mixed(ids + halves[:, :1]) ^ halves[:, 1:])
    fractions = ((bits >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-31)
    numbers = -np.log1p(-np.minimum(fractions, 1 - 2**-24).astype(np.float64))
    with np.errstate(divide="ignore"):
        times: npt.NDArray[np.float64] = numbers / weights
    return times


@cache
def native_sampling(
    instruction_set: InstructionSet | None = None, num_threads: int = 2
) -> NativeSampling:
    """Compile (or take from the user's cache) and load; skips where that is impossible."""
    try:
        handle = load_library(cache_dir() / "kernels", instruction_set=instruction_set)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    return NativeSampling(Team(Library(handle), num_threads))
