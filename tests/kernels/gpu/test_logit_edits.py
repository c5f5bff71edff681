"""Logits changed in place by kernels against torch, those around them bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels.grammar_mask import mask_tokens, mask_tokens_on_device
from remora.kernels.sampling import add_at, penalize
from tests.kernels.gpu.devices import interpreted_only

INF = float("inf")
# A product that is added to a sum may be rounded once with it or twice: units of the last place, of
# a result, and of terms up to 32 that may cancel.
RELATIVE, ABSOLUTE = 2**-22, 4e-6


def edit_and_check(device: str, num_rows: int, vocab_size: int, count: int) -> None:
    """Edit the logits of `count` distinct pairs of a row and an id."""
    wide = (3 * torch.randn(num_rows, vocab_size + 3)).to(device)
    logits, before = wide[:, :vocab_size], wide.clone()
    places = torch.randperm(num_rows * vocab_size)[:count].to(device)
    rows, ids = places // vocab_size, places % vocab_size
    values, presence, frequency = torch.randn(3, len(rows)).to(device)
    counts = torch.randint(0, 4, (len(rows),)).to(device)
    repetition = (torch.rand(len(rows)) + 0.5).to(device)
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}

    add_at(logits, rows, ids, values)
    expected = before[rows, ids] + values
    assert torch.equal(logits[rows, ids], expected)
    penalize(logits, rows, ids, counts, **penalties)

    exact = expected.double()
    exact = torch.where(exact > 0, exact / repetition, exact * repetition)
    exact -= presence * (counts > 0) + frequency.double() * counts
    torch.testing.assert_close(logits[rows, ids].double(), exact, rtol=RELATIVE, atol=ABSOLUTE)
    wide[rows, ids] = before[rows, ids]
    assert torch.equal(wide, before)


@interpreted_only
@settings(max_examples=15)
@given(num_rows=st.integers(1, 4), vocab_size=st.integers(1, 300), count=st.integers(0, 600))
def test_entries_are_changed_and_nothing_else(num_rows: int, vocab_size: int, count: int) -> None:
    torch.manual_seed(count)
    edit_and_check("cpu", num_rows, vocab_size, count)


def test_many_entries_are_changed(device: str) -> None:
    torch.manual_seed(0)
    edit_and_check(device, 3, 2000, 1500)


def test_entries_of_no_row_are_passed_over(device: str) -> None:
    logits = torch.arange(12.0, device=device).view(2, 6)
    rows = torch.tensor([-1, 1, -1], device=device)
    ids = torch.tensor([5, 2, 10**9], device=device)
    ones = torch.ones(3, device=device)

    add_at(logits, rows, ids, ones)
    penalize(logits, rows, ids, rows.abs(), repetition=ones, presence=ones, frequency=ones * 2)

    expected = torch.arange(12.0).view(2, 6)
    expected[1, 2] += 1 - 1 - 2
    assert torch.equal(logits.cpu(), expected)


def test_a_ban_leaves_a_logit_that_is_not_finite_to_be_noticed(device: str) -> None:
    logits = torch.tensor([[float("nan"), INF, 2.0]], device=device)
    rows, ids = torch.zeros(3, dtype=torch.int64, device=device), torch.arange(3, device=device)

    add_at(logits, rows, ids, torch.full((3,), -INF, device=device))

    assert logits.isnan().tolist() == [[True, True, False]]
    assert logits[0, 2] == -INF


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2047, 2100, 5000])
def test_masked_tokens_are_lost_and_all_else_stays(device: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(rng.normal(size=(4, vocab_size + 5)).astype(np.float32)).to(device)
    before = wide.cpu()
    lines = np.array([2, 0], np.int64)
    words = rng.integers(-(2**31), 2**31, (2, -(-vocab_size // 32))).astype(np.int32)

    mask_tokens(wide[:, :vocab_size], lines, words)

    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    before[[2, 0], :vocab_size] += torch.from_numpy(np.where(bits == 0, -np.inf, 0)).float()
    assert torch.equal(wide.cpu(), before)


def test_masks_of_no_row_are_passed_over_and_what_is_not_finite_stays_so(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), INF]], device=device)
    lines = torch.tensor([-1, 1], device=device)

    mask_tokens_on_device(logits, lines, torch.zeros(2, 1, dtype=torch.int32, device=device))

    assert logits[0].tolist() == [1.0, 2.0]
    assert bool(logits[1].isnan().all())
