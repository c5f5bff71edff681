"""Masked logits, in torch and in native code, against bits read one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.kernels.cpu.build import InstructionSet
from remora.kernels.grammar_mask import mask_tokens
from tests.sampling_kernels import NAMES, native_sampling, sampling_kernels


def make_case(
    seed: int, num_rows: int, vocab_size: int
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Logits, some of the rows in any order, and words of which many are full or empty."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32))
    lines = rng.permutation(num_rows)[: rng.integers(0, num_rows + 1)].astype(np.int64)
    shape = len(lines), -(-vocab_size // 32)
    words = rng.integers(-(2**31), 2**31, shape)
    words = np.where(rng.random(shape) < 0.6, rng.choice([0, -1], shape), words)
    return logits, lines, words.astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 31, 32, 33, 100, 1000]),
)
def test_what_is_not_allowed_is_lost_and_all_else_stays_bit_for_bit(
    name: str, seed: int, num_rows: int, vocab_size: int
) -> None:
    logits, lines, words = make_case(seed, num_rows, vocab_size)
    expected = logits.clone()
    for place, line in enumerate(lines):
        for token_id in range(vocab_size):
            if not words[place, token_id // 32] >> (token_id % 32) & 1:
                expected[line, token_id] = -torch.inf

    sampling_kernels(name).mask_tokens(logits, lines, words)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("instruction_set", [None, *InstructionSet], ids=str)
def test_every_instruction_set_masks_alike(instruction_set: InstructionSet | None) -> None:
    logits, lines, words = make_case(1, 5, 5000)
    expected = logits.clone()
    mask_tokens(expected, lines, words)

    native_sampling(instruction_set).mask_tokens(logits, lines, words)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_logit_that_is_not_finite_is_not_hidden(name: str) -> None:
    logits = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])

    sampling_kernels(name).mask_tokens(logits, np.array([0]), np.array([[8]], np.int32))

    assert logits.isnan().tolist() == [[True, True, False, False]]
    assert logits[0, 2:].tolist() == [-torch.inf, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_logits_between_others_are_masked_in_place(name: str) -> None:
    whole = torch.ones(3, 40)

    sampling_kernels(name).mask_tokens(whole[:, :33], np.array([1]), np.array([[-2, 0]], np.int32))

    assert whole.isinf().nonzero().tolist() == [[1, 0], [1, 32]]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (np.array([2]), np.zeros((1, 2), np.int32)),
        (np.array([-1]), np.zeros((1, 2), np.int32)),
        (np.array([0]), np.zeros((1, 1), np.int32)),
        (np.array([0, 1]), np.zeros((1, 2), np.int32)),
        (np.array([0]), np.zeros((1, 2), np.int64)),
    ],
)
def test_native_code_believes_no_wrong_shape(lines: np.ndarray, words: np.ndarray) -> None:
    with pytest.raises((IndexError, TypeError)):
        native_sampling().mask_tokens(torch.ones(2, 40), lines, words)
