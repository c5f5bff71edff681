"""Log-probabilities by kernels against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels import sampling
from remora.kernels.device_sampling import token_logprobs_on_device
from tests.kernels.gpu.devices import interpreted_only, poisoned_memory
from tests.kernels.test_sampling import LOGPROB_TOLERANCE, make_logits


def check(logits: Tensor, token_ids: list[int], num_top: int) -> None:
    """Compare with the torch code: ranks and ids exactly, ties included."""
    before = logits.clone()
    ids = torch.tensor(token_ids, dtype=torch.int64)

    with poisoned_memory():
        described = token_logprobs_on_device(logits, ids.to(logits.device), num_top)

    chosen, ranks, top_ids, top = sampling.token_logprobs(
        logits.double().cpu(), ids.numpy(), num_top
    )
    assert torch.equal(logits, before)
    assert [each.dtype for each in described] == [
        torch.float32,
        torch.int32,
        torch.int64,
        torch.float32,
    ]
    assert described[1].tolist() == ranks.tolist()
    assert described[2].tolist() == top_ids.tolist()
    for got, expected in ((described[0], chosen), (described[3], top)):
        np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=0, atol=LOGPROB_TOLERANCE)


@interpreted_only
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 2, 129, 2049, 4500]),
    step=st.sampled_from([1e-3, 0.5]),
    num_rows=st.integers(1, 3),
    num_top=st.sampled_from([0, 1, 3, 20]),
)
def test_tokens_are_described_as_torch_does(
    seed: int, vocab_size: int, step: float, num_rows: int, num_top: int
) -> None:
    logits = np.stack(
        [make_logits(seed + place, vocab_size, step, 2.0) for place in range(num_rows)]
    )
    ids = [seed * place % vocab_size for place in range(num_rows)]
    check(torch.from_numpy(logits), ids, num_top)


def test_equals_of_the_last_place_are_the_lowest_ids(device: str) -> None:
    logits = torch.zeros(1, 5000, device=device)
    logits[0, [4990, 30, 2500]] = 1.0

    check(logits, [77], 5)


def test_more_may_be_asked_for_than_there_are(device: str) -> None:
    torch.manual_seed(0)
    check(torch.randn(2, 7, device=device), [0, 6], 20)


def test_rows_may_lie_in_a_wider_tensor(device: str) -> None:
    torch.manual_seed(0)
    check(torch.randn(2, 300, device=device)[:, :250], [0, 249], 2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_good_harms_no_others(device: str, poison: float) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 2100, device=device), torch.tensor([1, 2, 3], device=device)
    alone = [each[[0, 2]] for each in token_logprobs_on_device(logits, ids, 3)]
    logits[1, 2060] = poison

    with poisoned_memory():
        described = token_logprobs_on_device(logits, ids, 3)

    for each, expected in zip(described, alone, strict=True):
        assert torch.equal(each[[0, 2]], expected)
    assert bool(((described[2] >= 0) & (described[2] < 2100)).all())
