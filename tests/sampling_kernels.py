"""The implementations of sampling by name, for tests that hold for each of them."""

from __future__ import annotations

from functools import cache

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
