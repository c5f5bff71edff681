"""Storing by kernels against torch, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.kv_store import GREATEST, SCALE_DTYPE, store_kv, store_kv_reference
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
    return pages, poisoned(*shape[:4], dtype=SCALE_DTYPE, device=str(heads.device))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().cpu().view(torch.uint8)


def store_and_check(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    stored: torch.dtype,
    *,
    page_size: int,
    static_scales: Tensor | None = None,
) -> None:
    """Store in pages of which there are as few as slots need; compare all memory."""
    num_pages = 1 + int(slots.max()) // page_size if len(slots) else 1
    pages, scales = make_pages(num_pages, page_size, key, stored)
    expected, scale = make_pages(num_pages, page_size, key.cpu(), stored)

    static = None if static_scales is None else static_scales.cpu()
    store_kv(key, value, pages, slots, scales, static_scales)
    store_kv_reference(key.cpu(), value.cpu(), expected, slots.cpu(), scale, static)

    assert torch.equal(as_bytes(pages), as_bytes(expected))
    if scales is not None and scale is not None:
        assert torch.equal(as_bytes(scales), as_bytes(scale))


@interpreted_only
@settings(max_examples=30)
@given(
    slots=st.lists(st.integers(0, 40), max_size=5, unique=True),
    num_heads=st.integers(1, 9),
    dim=st.integers(1, 140),
    page_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    quantised=st.sampled_from([None, *GREATEST]),
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


@pytest.mark.parametrize("stored", GREATEST, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_static_scales_divide_and_clip(
    device: str, dtype: torch.dtype, stored: torch.dtype
) -> None:
    torch.manual_seed(0)
    fused = (5 * torch.randn(4, 6, 80, device=device)).to(dtype)
    fused[0, :, 7], fused[1, :, 7] = float("inf"), float("nan")
    slots = torch.tensor([33, 16, 0, 47], device=device)
    scales = torch.tensor([[0.5, 5.0, 50.0], [2.0, 0.1, 20.0]], device=device) / GREATEST[stored]

    store_and_check(
        fused[:, :3],
        fused[:, 3:],
        slots,
        stored,
        page_size=16,
        static_scales=scales.to(SCALE_DTYPE),
    )


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


@pytest.mark.parametrize(("stored", "beyond"), [(FP8, 0x7F), (torch.float8_e5m2, 0x7C)])
def test_every_number_is_stored_as_itself_and_others_as_the_nearest(
    device: str, stored: torch.dtype, beyond: int
) -> None:
    exact = torch.arange(beyond, dtype=torch.uint8).view(stored).float()
    middles = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((middles, middles * (1 + 1e-6), middles * (1 - 1e-6)))
    numbers = torch.cat((exact, -exact, near, -near))
    # The greatest is among them: the scale is 1.
    heads = numbers.view(1, 1, -1).to(device)
    pages, scales = make_pages(1, 1, heads, stored)

    store_kv(heads, heads, pages, torch.tensor([0], device=device), scales)

    assert torch.equal(as_bytes(pages[0, 0, 0, 0]), numbers.to(stored).view(torch.uint8))


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
