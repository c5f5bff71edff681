"""Samplers by each of the kernels that a CPU has, and clients of engines over the fake model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from remora.engine.client import LocalEngineClient
from remora.engine.sampling.sampler import Sampler
from remora.engine.sampling.token_sampler import HostTokenSampler, SamplingKernels
from remora.engine.types import RowInit
from tests.engine.fakes import FakeRunner, MakeClient, make_engine, make_plan
from tests.engine.sampling.constrained import EOS as END_OF_SEQUENCE
from tests.engine.sampling.constrained import VOCAB
from tests.engine.sampling.sampled import EOS, VOCAB_SIZE, MakeSampler
from tests.sampling_kernels import NAMES, sampling_kernels


@pytest.fixture(scope="module", params=NAMES)
def kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    return sampling_kernels(request.param)


@pytest.fixture(scope="module")
def make_sampler(kernels: SamplingKernels) -> MakeSampler:
    """`make_sampler(*rows)` returns a sampler that holds the rows."""

    def make(*inits: RowInit, max_rows: int = 16, vocab_size: int = VOCAB_SIZE) -> Sampler:
        sampler = Sampler(
            max_rows=max_rows,
            vocab_size=vocab_size,
            eos_token_ids=[END_OF_SEQUENCE if vocab_size == VOCAB else EOS],
            token_sampler=HostTokenSampler(kernels),
        )
        for init in inits:
            sampler.add_row(init)
        return sampler

    return make


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    """`make_client(runner, **plan)` returns a client, which is closed at the end."""
    made: list[LocalEngineClient] = []

    def make(runner: FakeRunner | None = None, **plan: object) -> LocalEngineClient:
        made.append(LocalEngineClient(make_engine(make_plan(**plan), runner), None))
        return made[-1]

    yield make
    for client in made:
        client.close()
