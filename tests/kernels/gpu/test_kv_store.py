"""Storing by kernels against torch: bit by bit, or within a step of what is quantised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.kv_store import GREATEST, store_kv, store_kv_reference
from tests.kernels.gpu.devices import interpreted_only, poisoned

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn
FORMATS = pytest.mark.parametrize(
    ("dtype", "quantised"),
    [(dtype, each) for dtype in DTYPES for each in (None, *GREATEST)],
    ids=str,
)


def make_pages(
    num_pages: int, page_size: int, heads: Tensor, stored: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return pages whose bytes are all 0x5a, and scales of NaN where they are needed."""
    shape = 2, num_pages, page_size, *heads.shape[1:]
    pages = torch.empty(shape, dtype=stored, device=heads.device)
    pages.view(torch.uint8).fill_(0x5A)
    if stored not in GREATEST:
        return pages, None
    return pages, poisoned(*shape[:4], dtype=torch.float32, device=str(heads.device))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().cpu().view(torch.uint8)


def compare(pages: Tensor, scales: Tensor | None, expected: Tensor, scale: Tensor | None) -> None:
    """Compare pages by bits; quantised ones may be a step off where a number is between two."""
    if scales is None or scale is None:
        assert torch.equal(as_bytes(pages), as_bytes(expected))
        return
    torch.testing.assert_close(scales.cpu(), scale.cpu(), rtol=1e-6, atol=0, equal_nan=True)
    # Bytes of e4m3 of one sign are in order, so that neighbours differ by 1 as those of int8 do.
    steps = pages.view(torch.int8).cpu().short() - expected.view(torch.int8).cpu().short()
    assert steps.abs().max() <= 1
    assert steps.count_nonzero() <= 1 + steps.numel() // 1000


def store_and_check(
    key: Tensor, value: Tensor, slots: Tensor, stored: torch.dtype, *, page_size: int
) -> None:
    """Store in pages of which there are as few as slots need; compare all memory."""
    num_pages = 1 + int(slots.max()) // page_size if len(slots) else 1
    pages, scales = make_pages(num_pages, page_size, key, stored)
    expected, scale = make_pages(num_pages, page_size, key.cpu(), stored)

    store_kv(key, value, pages, slots, scales)
    store_kv_reference(key.cpu(), value.cpu(), expected, slots.cpu(), scale)

    compare(pages, scales, expected, scale)


@interpreted_only
@settings(max_examples=30)
@given(
    slots=st.lists(st.integers(0, 40), max_size=5, unique=True),
    num_heads=st.integers(1, 9),
    dim=st.integers(1, 140),
    page_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    quantised=st.sampled_from([None, torch.int8, FP8]),
)
def test_tokens_land_in_their_slots_as_torch_puts_them(
    slots: list[int],
    num_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    quantised: torch.dtype | None,
) -> None:
    torch.manual_seed(dim)
    key, value = torch.randn(2, len(slots), num_heads, dim).to(dtype)
    at = torch.tensor(slots, dtype=torch.int64)
    store_and_check(key, value, at, quantised or dtype, page_size=page_size)


@FORMATS
@pytest.mark.parametrize("page_size", [1, 16])
def test_heads_in_a_projection_are_stored(
    device: str, dtype: torch.dtype, quantised: torch.dtype | None, page_size: int
) -> None:
    torch.manual_seed(0)
    fused = (5 * torch.randn(4, 20, 128, device=device)).to(dtype)
    slots = torch.tensor([33, 16, 0, 47], device=device)

    store_and_check(fused[:, 4:12], fused[:, 12:], slots, quantised or dtype, page_size=page_size)


@FORMATS
def test_what_is_stored_is_finite(
    device: str, dtype: torch.dtype, quantised: torch.dtype | None
) -> None:
    edges = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -0.0], dtype=dtype)
    heads = torch.stack((edges, edges.nan_to_num(0, 2, -2), torch.zeros(5, dtype=dtype))).to(device)
    slots = torch.tensor([5, 3, 0], device=device)

    store_and_check(heads[:, None], heads[:, None], slots, quantised or dtype, page_size=4)

    pages, scales = make_pages(2, 4, heads[:, None], quantised or dtype)
    store_kv(heads[:, None], heads[:, None], pages, slots, scales)
    assert pages[:, [1, 0, 0], [1, 3, 0]].float().isfinite().all()


def test_every_number_of_e4m3_is_stored_as_itself_and_others_as_the_nearest(device: str) -> None:
    exact = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((middles, middles * (1 + 1e-6), middles * (1 - 1e-6)))
    numbers = torch.cat((exact, -exact, near, -near))
    # 448 is among them: the scale is 1.
    heads = numbers.view(1, 1, -1).to(device)
    pages, scales = make_pages(1, 1, heads, FP8)

    store_kv(heads, heads, pages, torch.tensor([0], device=device), scales)

    expected = numbers.to(FP8).view(torch.uint8)
    stored = pages[0, 0, 0, 0].view(torch.uint8).cpu()
    is_zero = numbers.to(FP8).float() == 0  # of either sign
    assert torch.equal(stored[~is_zero], expected[~is_zero])
    assert pages[0, 0, 0, 0].cpu().float()[is_zero].eq(0).all()


def test_heads_too_small_for_a_scale_become_zeros(device: str) -> None:
    heads = torch.full((1, 1, 8), 1e-38, device=device)
    pages, scales = make_pages(1, 1, heads, torch.int8)

    store_kv(heads, heads, pages, torch.tensor([0], device=device), scales)

    assert pages.count_nonzero() == 0
    assert scales is not None
    assert scales.isfinite().all()


def test_scales_must_fit_the_pages() -> None:
    heads, slots = torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int64)
    pages, scales = make_pages(1, 1, heads, torch.int8)

    with pytest.raises(TypeError, match="need scales"):
        store_kv(heads, heads, pages, slots)
    with pytest.raises(TypeError, match="need no scales"):
        store_kv(heads, heads, pages.float(), slots, scales)
