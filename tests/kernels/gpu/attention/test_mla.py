"""Kernels of attention over latents against the torch code."""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.kernels.gpu.devices import INTERPRETED, interpreted_only, on_gpu, poisoned
from tests.kernels.gpu.paged import TOLERANCES, Paged, Row, make_paged, starts_of


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch fewer programs than a GPU has room for: interpreted, each takes milliseconds."""
    if INTERPRETED:
        few = kernels.LatentLaunch(queries=32, keys=32, num_warps=4, num_stages=2, programs=4)
        monkeypatch.setattr(kernels, "launch_of", lambda *shape: few)


def make_latents(lengths: Sequence[int], size: int, **options: Any) -> tuple[Paged, Tensor]:
    """Return rows, whose K stands for latents, and pages [num_pages, page_size, size]."""
    paged = make_paged(lengths, head_dim=size, **options)
    return paged, paged.kv_pages[0].squeeze(2).contiguous()


def check(
    rows: Sequence[Row],
    *,
    decodes: tuple[bool, ...] = (True, False),
    num_heads: int = 2,
    sizes: tuple[int, int] = (32, 16),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    fixed_split: bool = False,
) -> None:
    """Decode rows, and extend them between tokens of none; compare with torch in float64."""
    torch.manual_seed(sum(length for _, length in rows))
    latent_size, size = sizes[0], sum(sizes)
    paged, pages = make_latents(
        [length for _, length in rows], size, page_size=page_size, dtype=dtype, device=device
    )
    for is_decode in decodes:
        starts = starts_of(rows, 2, device)
        bounds = [paged.lengths] if is_decode else [starts, paged.lengths]
        num_tokens = len(rows) if is_decode else int(starts[-1]) + 3
        query = torch.randn(num_tokens, num_heads, size, device=device).to(dtype)
        given = (query, pages, paged.tables, *bounds)
        out = poisoned(num_tokens, num_heads, latent_size, dtype=dtype, device=device)
        expected = poisoned(*out.shape, dtype=torch.float64, device="cpu")
        exact = (query.double().cpu(), pages.double().cpu(), *(each.cpu() for each in given[2:]))
        options: dict[str, Any] = {"latent_size": latent_size, "scale": size**-0.5, "out": out}

        if is_decode:
            made = attend_latents(*given, fixed_split=fixed_split, **options)
            attend_latents_reference(*exact, scale=size**-0.5, out=expected)
        else:
            made = extend_over_latents(*given, **options)
            extend_over_latents_reference(*exact, scale=size**-0.5, out=expected)

        assert made is out
        torch.testing.assert_close(
            out.double().cpu(),
            expected,
            atol=TOLERANCES[dtype],
            rtol=TOLERANCES[dtype],
            equal_nan=not is_decode,
        )


@pytest.mark.parametrize("fixed_split", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_decoded_rows_of_any_length_agree_with_torch(
    device: str, dtype: torch.dtype, fixed_split: bool
) -> None:
    rows = [(1, length) for length in (0, 1, 15, 16, 17, 300)]

    check(rows, decodes=(True,), dtype=dtype, device=device, fixed_split=fixed_split)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_extended_rows_of_any_length_agree_with_torch(device: str, dtype: torch.dtype) -> None:
    rows = [(0, 0), (1, 1), (17, 17), (0, 9), (1, 200), (15, 16), (40, 95)]

    check(rows, decodes=(False,), dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        *(([(3, 19), (5, 140)], {"num_heads": count}) for count in (1, 3, 16, 40)),
        *(
            ([(min(3, n), n) for n in (size - 1, size, size + 1)], {"page_size": size})
            for size in (1, 5, 64)
        ),
        *(
            ([(3, 70), (0, 3)], {"num_heads": 16, "sizes": (512, 64), "dtype": dtype})
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_every_shape_agrees_with_torch(
    device: str, rows: list[Row], options: dict[str, Any]
) -> None:
    check(rows, device=device, **options)


def test_a_row_has_the_same_bits_in_any_batch(device: str) -> None:
    torch.manual_seed(0)
    paged, pages = make_latents([40, 700, 7], 48, device=device)
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
def test_ragged_rows_agree_with_torch(rows: list[Row], **options: Any) -> None:
    """rows: new tokens, and tokens before them."""
    check([(count, count + before) for count, before in rows], **options)


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_real_sizes_agree_with_torch_on_a_gpu(num_heads: int) -> None:
    lengths = [4096, 1, 1023, 1024, 1025, 900, *[300] * 30]
    rows = [(min(129, length), length) for length in lengths] + [(500, 500), (0, 0)]

    check(rows, num_heads=num_heads, sizes=(512, 64), dtype=torch.bfloat16, device="cuda")
