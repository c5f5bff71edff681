"""Choosing on a device says what choosing on the host says, only later."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.graphs.device_stream import HostStream
from remora.engine.sampling.token_sampler import Draws, HostTokenSampler
from remora.engine.types import LOGPROB_FIELDS, NO_TOKEN_LEFT, NOT_FINITE
from remora.kernels import sampling as sampling_kernels

CPU = HostStream(torch.device("cpu"))
VOCAB = 40


def make_draws(num_rows: int, seed: int) -> Draws:
    numbers = np.random.default_rng(seed)
    return Draws(
        temperature=numbers.choice([0.0, 0.7, 1.5], num_rows).astype(np.float32),
        keys=numbers.integers(-(2**63), 2**63, num_rows),
        top_k=numbers.choice([0, 3, 10], num_rows).astype(np.int64),
        top_p=numbers.choice([1.0, 0.8], num_rows),
        min_p=numbers.choice([0.0, 0.1], num_rows).astype(np.float32),
    )


@given(num_rows=st.integers(1, 6), seed=st.integers(0, 50), greedy=st.booleans())
def test_tokens_and_their_probabilities_are_the_hosts(
    num_rows: int, seed: int, greedy: bool
) -> None:
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    draws = None if greedy else make_draws(num_rows, seed)
    lines = np.arange(0, num_rows, 2)
    on_device, on_host = DeviceTokenSampler(CPU, 6, None), HostTokenSampler(sampling_kernels)
    raw = logits[torch.from_numpy(lines)].clone()

    chosen = on_device.choose(logits.clone(), draws)
    described = on_device.describe(raw, lines, chosen, 3, (5, 1))
    expected = on_host.choose(logits.clone(), draws)

    assert chosen.token_ids.tolist() == expected.take()[0].tolist()
    token_ids, faults = chosen.take()
    assert token_ids.tolist() == expected.take()[0].tolist()
    assert faults == {}
    ours, theirs = described.take(), on_host.describe(raw, lines, expected, 3, (5, 1)).take()
    assert ours.asked_ids.shape == (len(lines), 2)
    for name in LOGPROB_FIELDS:
        assert np.array_equal(getattr(ours, name), getattr(theirs, name))


def test_lines_without_a_token_say_why() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3, 5] = torch.inf

    _, faults = DeviceTokenSampler(CPU, 4, None).choose(logits, None).take()

    assert faults == {1: NO_TOKEN_LEFT, 2: NOT_FINITE, 3: NOT_FINITE}
    assert HostTokenSampler(sampling_kernels).choose(logits, None).take()[1] == faults
