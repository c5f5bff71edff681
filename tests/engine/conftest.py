"""Samplers by each of the kernels that a CPU has."""

from __future__ import annotations

import pytest

from remora.engine.sampling.sampler import (
    Sampler,
)
from remora.engine.sampling.token_sampler import HostTokenSampler, SamplingKernels
from tests.engine.sampling.constrained import EOS as END_OF_SEQUENCE
from tests.engine.sampling.constrained import VOCAB
from tests.engine.sampling.sampled import (
    EOS,
    VOCAB_SIZE,
    MakeSampler,
)
from tests.sampling_kernels import NAMES, sampling_kernels


@pytest.fixture(scope="module", params=NAMES)
def kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    return sampling_kernels(request.param)


@pytest.fixture(scope="module")
def make_sampler(kernels: SamplingKernels) -> MakeSampler:
    def make(max_rows: int = 16, vocab_size: int = VOCAB_SIZE) -> Sampler:
        return Sampler(
            max_rows=max_rows,
            vocab_size=vocab_size,
            eos_token_ids=[END_OF_SEQUENCE if vocab_size == VOCAB else EOS],
            token_sampler=HostTokenSampler(kernels),
        )

    return make
