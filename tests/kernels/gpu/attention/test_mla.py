"""Kernels of attention over latents against the torch code."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.attention.mla import (
    attend_latents,
    attend_latents_reference,
    extend_over_latents,
    extend_over_latents_reference,
)
from remora.kernels.gpu.attention import mla as kernels
from tests.kernels.gpu.devices import INTERPRETED, interpreted_only, on_devices, on_gpu, poisoned
from tests.kernels.gpu.paged import TOLERANCES, Paged, make_paged


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch fewer programs than a GPU has room for: interpreted, each takes milliseconds."""
    if INTERPRETED:
        few = kernels.LatentLaunch(queries=32, keys=32, num_warps=4, num_stages=2, programs=4)
        monkeypatch.setattr(kernels, "launch_of", lambda *shape: few)


def make_latents(
    lengths: list[int], size: int, *, page_size: int, dtype: torch.dtype, device: str
) -> tuple[Paged, Tensor]:
    """Return rows, whose K stands for latents, and pages [num_pages, page_size, size]."""
    paged = make_paged(
        lengths, page_size=page_size, num_kv_heads=1, head_dim=size, dtype=dtype, device=device
    )
    return paged, paged.kv_pages[0].squeeze(2).contiguous()


def check_decode(
    lengths: list[int],
    *,
    num_heads: int = 2,
    sizes: tuple[int, int] = (32, 16),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    fixed_split: bool = False,
) -> None:
    """Attend rows of these lengths; compare with the torch code in float64."""
    torch.manual_seed(sum(lengths))
    latent_size, size = sizes[0], sum(sizes)
    paged, pages = make_latents(lengths, size, page_size=page_size, dtype=dtype, device=device)
    query = torch.randn(len(lengths), num_heads, size, device=device).to(dtype)
    options: dict[str, Any] = {"scale": size**-0.5}
    out = poisoned(len(lengths), num_heads, latent_size, dtype=dtype, device=device)
    expected = torch.empty(out.shape, dtype=torch.float64)

    given = attend_latents(
        query,
        pages,
        paged.tables,
        paged.lengths,
        latent_size=latent_size,
        fixed_split=fixed_split,
        out=out,
        **options,
    )
    exact = (query.double().cpu(), pages.double().cpu(), paged.tables.cpu(), paged.lengths.cpu())
    attend_latents_reference(*exact, out=expected, **options)

    assert given is out
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)


def check_extend(
    rows: list[tuple[int, int]],
    *,
    num_heads: int = 2,
    sizes: tuple[int, int] = (32, 16),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Extend rows of (new tokens, tokens with those), between tokens of none."""
    lengths = [length for _, length in rows]
    torch.manual_seed(sum(lengths))
    latent_size, size = sizes[0], sum(sizes)
    paged, pages = make_latents(lengths, size, page_size=page_size, dtype=dtype, device=device)
    starts = list(accumulate((count for count, _ in rows), initial=2))
    query = torch.randn(starts[-1] + 3, num_heads, size, device=device).to(dtype)
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"scale": size**-0.5}
    out = poisoned(len(query), num_heads, latent_size, dtype=dtype, device=device)
    expected = poisoned(*out.shape, dtype=torch.float64, device="cpu")

    given = extend_over_latents(
        query,
        pages,
        paged.tables,
        bounds,
        paged.lengths,
        latent_size=latent_size,
        out=out,
        **options,
    )
    extend_over_latents_reference(
        query.double().cpu(),
        pages.double().cpu(),
        paged.tables.cpu(),
        bounds.cpu(),
        paged.lengths.cpu(),
        out=expected,
        **options,
    )

    assert given is out
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        out.double().cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True
    )


@on_devices
@pytest.mark.parametrize("fixed_split", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_any_length_agree_with_torch(
    device: str, dtype: torch.dtype, fixed_split: bool
) -> None:
    lengths = [0, 1, 15, 16, 17, 300]

    check_decode(lengths, dtype=dtype, device=device, fixed_split=fixed_split)


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_extended_rows_of_any_length_agree_with_torch(device: str, dtype: torch.dtype) -> None:
    rows = [(0, 0), (1, 1), (17, 17), (0, 9), (1, 200), (15, 16), (40, 95)]

    check_extend(rows, dtype=dtype, device=device)


@on_devices
@pytest.mark.parametrize("num_heads", [1, 3, 16, 40])
def test_heads_may_be_any_number(device: str, num_heads: int) -> None:
    check_decode([19, 140], num_heads=num_heads, device=device)
    check_extend([(3, 3), (5, 21)], num_heads=num_heads, device=device)


@on_devices
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_pages_may_be_of_any_size(device: str, page_size: int) -> None:
    lengths = [page_size - 1, page_size, page_size + 1]

    check_decode(lengths, page_size=page_size, device=device)
    check_extend([(min(3, n), n) for n in lengths], page_size=page_size, device=device)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_of_deepseek_agree_with_torch(device: str, dtype: torch.dtype) -> None:
    check_decode([70, 3], num_heads=16, sizes=(512, 64), dtype=dtype, device=device)
    check_extend([(3, 35)], num_heads=16, sizes=(512, 64), dtype=dtype, device=device)


@on_devices
def test_a_row_is_the_same_bits_whoever_is_beside_it(device: str) -> None:
    torch.manual_seed(0)
    paged, pages = make_latents([40, 700, 7], 48, page_size=16, dtype=torch.float32, device=device)
    query = torch.randn(3, 2, 48, device=device)
    options: dict[str, Any] = {"latent_size": 32, "scale": 0.2, "fixed_split": True}

    together = attend_latents(query, pages, paged.tables, paged.lengths, **options)

    for row in range(3):
        rows = slice(row, row + 1)
        alone = attend_latents(
            query[rows], pages, paged.tables[rows], paged.lengths[rows], **options
        )
        assert torch.equal(alone[0], together[row])


@interpreted_only
@settings(max_examples=10)
@given(
    rows=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 90)), min_size=1, max_size=3),
    num_heads=st.integers(1, 7),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 24)),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_ragged_rows_agree_with_torch(rows: list[tuple[int, int]], **options: Any) -> None:
    """Of tokens and of context before them."""
    check_extend([(count, count + before) for count, before in rows], **options)
    check_decode([count + before for count, before in rows], **options)


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_real_sizes_agree_with_torch_on_a_gpu(num_heads: int) -> None:
    common: dict[str, Any] = {
        "num_heads": num_heads,
        "sizes": (512, 64),
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    check_decode([4096, 1, 1023, 1024, 1025] + [300] * 30, **common)
    check_extend([(1, 900), (500, 500), (0, 0), (129, 1000)], **common)
