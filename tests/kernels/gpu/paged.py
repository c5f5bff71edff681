"""Rows of random keys and values in pages, and around them what kernels must not touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.kernels.attention.decode import attend_decode_paged, attend_decode_paged_reference
from remora.kernels.attention.prefill import attend_extend, attend_extend_reference
from remora.kernels.gpu.arch import Arch
from tests.kernels.gpu.devices import poisoned

NOWHERE = 2**30  # in tables, past a row's last page: reading there ends the process

# What a value of about one is wrong by at most, to values of at most four: products and sums are
# exact to float32's digits, but weights and the result are each rounded to 24, 11 or 8 bits.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of 8 bits: weights are bfloat16 then, whatever the queries are.
NARROW_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 3e-2}


Row = tuple[int, int]  # new tokens, and all tokens
BF16 = {"dtype": torch.bfloat16}
# Rows and options that decoding and extending are both compared with torch on.
SHAPES: list[tuple[list[Row], dict[str, Any]]] = [
    *(
        ([(min(9, n), n) for n in (size - 1, size, size + 1, 130)], {"page_size": size})
        for size in (1, 2, 5, 32, 64)
    ),
    *(
        ([(3, 3), (2, 21)], {"heads": heads, **BF16})
        for heads in ((9, 3), (7, 1), (33, 1), (71, 1), (300, 2))
    ),
    *(([(3, 3), (9, 70)], {"head_dim": size, **BF16}) for size in (64, 80, 96, 128, 256)),
    *(
        ([(0, 0), (20, 20), (1, 150), (33, 180), (1, 301)], {"window": window, **dtype})
        for window in (1, 16, 50, 300)
        for dtype in ({}, BF16)
    ),
    *(
        ([(1, 1), (40, 40), (5, 80), (1, 300)], {"window": window, **options})
        for window in (None, 20)
        for options in (
            {"heads": (6, 2), "with_sinks": True},
            {"soft_cap": 0.5},
            {"soft_cap": 30.0},
        )
    ),
    *(
        ([(5, 70), (3, 3)], {"kv_dtype": kv_dtype, "scaled": scaled, "dtype": dtype})
        for kv_dtype, scaled in (
            (torch.int8, True),
            (torch.float8_e4m3fn, True),
            (torch.float8_e4m3fn, False),
            (torch.float8_e5m2, True),
            (torch.float8_e5m2, False),
        )
        for dtype in TOLERANCES
    ),
    # More rows than the shortest vector of rows holds.
    ([(2, 5)] * 11 + [(0, 0), (40, 41)] + [(1, 3)] * 7, {}),
]


@dataclass(frozen=True, slots=True)
class Paged:
    """Pages that belong to rows, in random order, and their tables."""

    kv_pages: Tensor
    kv_scales: Tensor | None
    tables: Tensor
    lengths: Tensor

    @property
    def exact(self) -> dict[str, Any]:
        """The same rows for the torch code, in float64 on a CPU."""
        return {
            "kv_pages": self.kv_pages.double().cpu(),
            "kv_scales": None if self.kv_scales is None else self.kv_scales.double().cpu(),
            "tables": self.tables.cpu(),
            "lengths": self.lengths.cpu(),
        }


def make_paged(
    lengths: Sequence[int],
    *,
    device: str,
    page_size: int = 16,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
) -> Paged:
    """Fill rows with random elements; slots of no row are NaN, or whatever is worst in 8 bits."""
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed)).to(torch.int32) + 1  # page 0 belongs to no row
    tables = torch.full((len(lengths), max(needed) + 2), NOWHERE, dtype=torch.int32)
    shape = (2, sum(needed) + 1, page_size, num_kv_heads, head_dim)
    elements = torch.full(shape, float("nan"))
    scales = torch.full(shape[:-1], float("nan"))
    first = 0
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        pages = order[first : first + count]
        tables[row, :count] = pages
        first += count
        for at in range(length):
            page = pages[at // page_size]
            elements[:, page, at % page_size] = torch.randn(2, num_kv_heads, head_dim)
            scales[:, page, at % page_size] = torch.rand(2, num_kv_heads) / 30 + 1e-3
    if dtype is torch.int8:
        elements = elements.mul(40).nan_to_num(127).clamp(-127, 127).round()
    return Paged(
        elements.to(dtype).to(device),
        scales.bfloat16().to(device) if scaled else None,
        tables.to(device)[:, : max(needed) + 1],
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def attend_rows(
    query: Tensor, paged: Paged, starts: Tensor | None = None, **options: Any
) -> Tensor:
    """Attend parts of wider tokens into parts of wider memory full of NaN; no `starts`: decode."""
    num_tokens, num_heads, head_dim = query.shape
    shape = num_tokens, num_heads + 5, head_dim
    wide = poisoned(*shape, dtype=query.dtype, device=str(query.device))
    wide_query = torch.cat((wide[:, :1], query, wide[:, :2]), dim=1)[:, 1:-2]
    out = wide[:, 3:-2]
    options = {"scale": head_dim**-0.5, "window": None, **options}
    options |= {"kv_scales": paged.kv_scales, "out": out}
    rows = (paged.lengths,) if starts is None else (starts, paged.lengths)
    attend = attend_decode_paged if starts is None else attend_extend
    given = attend(wide_query, paged.kv_pages, paged.tables, *rows, **options)
    assert given is out
    assert wide[:, :3].isnan().all()
    assert wide[:, -2:].isnan().all()
    return out


def starts_of(rows: Sequence[Row], first: int, device: str) -> Tensor:
    counts = [count for count, _ in rows]
    return torch.tensor(list(accumulate(counts, initial=first)), dtype=torch.int32, device=device)


def check_rows(
    rows: Sequence[Row],
    *,
    decodes: bool,
    heads: tuple[int, int] = (2, 1),
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    with_sinks: bool = False,
    fixed_splits: tuple[bool, ...] = (False, True),
    head_dim: int = 16,
    page_size: int = 16,
    scaled: bool = False,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Decode rows, or extend them between tokens of none; compare with torch in float64."""
    lengths = [length for _, length in rows]
    torch.manual_seed(sum(lengths))
    paged = make_paged(
        lengths,
        page_size=page_size,
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=kv_dtype or dtype,
        device=device,
        scaled=scaled,
    )
    starts = starts_of(rows, 2, device)
    num_tokens = len(rows) if decodes else int(starts[-1]) + 3
    query = torch.randn(num_tokens, heads[0], head_dim, device=device).to(dtype)
    options = {"scale": 1.5 * head_dim**-0.5, "window": None, **options}
    sinks = torch.randn(heads[0]) * 3 if with_sinks else None
    exact = {**paged.exact, **options, "sinks": sinks}
    options["sinks"] = None if sinks is None else sinks.to(device)

    if decodes:
        made = [attend_rows(query, paged, fixed_split=each, **options) for each in fixed_splits]
        expected = attend_decode_paged_reference(query.double().cpu(), **exact)
    else:
        made = [attend_rows(query, paged, starts, **options)]
        expected = torch.full(query.shape, float("nan"), dtype=torch.float64)
        attend_extend_reference(query.double().cpu(), starts=starts.cpu(), out=expected, **exact)

    tolerance = (TOLERANCES if kv_dtype is None else NARROW_TOLERANCES)[dtype]
    for out in made:
        torch.testing.assert_close(
            out.double().cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True
        )


def launch_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Let decoding launch fewer programs than a GPU has room for.

    Interpreted, each takes milliseconds, also those that find nothing to do.
    """
    from remora.kernels.gpu.attention import decode as kernels

    few = kernels.DecodeLaunch(keys=64, num_warps=4, num_stages=2, programs=4)
    patch.setattr(kernels, "LAUNCHES", {Arch.HOPPER: {64: few, 128: few, 256: few}})
