"""Four bits in the words of others' checkpoints and in ours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.quantised.int4 import from_awq, from_gptq, pack_int4

# By hand, from the formats' definitions: which of eight outputs (AWQ) or inputs (GPTQ) a word's
# digit counts, the lowest digit first.
AWQ_WORD, AWQ_NUMBERS = 0x75316420, (0, 1, 2, 3, 4, 5, 6, 7)
GPTQ_WORD, GPTQ_NUMBERS = 0x76543210, (0, 1, 2, 3, 4, 5, 6, 7)


def words(rows: int, columns: int, word: int) -> Tensor:
    return torch.full((rows, columns), word, dtype=torch.int32)


@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 300),
    group_size=st.sampled_from([32, 64, 128, 256]),
    seed=st.integers(0, 9),
)
def test_a_packed_weight_is_what_was_packed(
    outputs: int, inputs: int, group_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    groups = -(-inputs // group_size)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales, zeros = torch.rand(groups, outputs), torch.randint(0, 17, (groups, outputs))

    weight = pack_int4(values, scales, zeros, group_size=group_size)

    of_inputs = torch.arange(inputs) // group_size
    expected = (values - zeros[of_inputs].T.float()) * scales[of_inputs].T
    assert torch.equal(weight.dequantised(), expected)
    assert weight.values.shape[1] % weight.half == 0


@pytest.mark.parametrize(("is_zero_less_one", "zero"), [(True, 9), (False, 8)])
def test_words_of_gptq_hold_inputs_and_their_zero_points_less_one(
    is_zero_less_one: bool, zero: int
) -> None:
    weight = from_gptq(
        words(8, 16, GPTQ_WORD),
        words(2, 2, -0x77777778),
        torch.full((2, 16), 0.5),
        group_size=32,
        is_zero_less_one=is_zero_less_one,
    )

    expected = (torch.tensor(GPTQ_NUMBERS * 8) - zero) * 0.5
    assert torch.equal(weight.dequantised(), expected.expand(16, 64))


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_zero_points_less_one_borrow_from_their_neighbours(zeros: list[int]) -> None:
    whole = sum(zero << 4 * place for place, zero in enumerate(zeros))
    less = (whole - 0x11111111) % 2**32
    stored = torch.tensor([[less - 2**32 if less >= 2**31 else less]], dtype=torch.int32)

    weight = from_gptq(words(4, 8, 0), stored, torch.ones(1, 8), group_size=32)

    assert weight.zeros.tolist() == [zeros]


def test_words_of_awq_hold_outputs_the_even_ones_first() -> None:
    scales = torch.arange(1.0, 17.0).expand(2, 16)

    weight = from_awq(words(64, 2, AWQ_WORD), words(2, 2, AWQ_WORD), scales, group_size=32)
    plain = from_awq(words(64, 2, AWQ_WORD), words(2, 2, 0), scales, group_size=32)

    assert not weight.dequantised().any()
    expected = torch.tensor(AWQ_NUMBERS * 2) * scales[0]
    assert torch.equal(plain.dequantised(), expected[:, None].expand(16, 64))


@pytest.mark.parametrize(
    ("groups", "group_size", "message"), [(2, 48, "groups of 48"), (3, 64, "scales")]
)
def test_groups_that_cannot_be_are_refused(groups: int, group_size: int, message: str) -> None:
    values = torch.zeros(4, 128, dtype=torch.uint8)
    zeros = torch.zeros(groups, 4)

    with pytest.raises(ValueError, match=message):
        pack_int4(values, zeros, zeros, group_size=group_size)
