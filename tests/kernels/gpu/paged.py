"""Rows of random keys and values in pages, and around them what kernels must not touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.kernels.gpu.arch import Arch

NOWHERE = 2**30  # in tables, past a row's last page: reading there ends the process

# What a value of about one is wrong by at most, to values of at most four: products and sums are
# exact to float32's digits, but weights and the result are each rounded to 24, 11 or 8 bits.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of 8 bits: weights are bfloat16 then, whatever the queries are.
NARROW_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 3e-2}


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
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    scaled: bool = False,
) -> Paged:
    """Fill rows with random elements; slots of no row are NaN, or whatever is worst in 8 bits."""
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed)).to(torch.int32) + 1  # page 0 is nobody's
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
        scales.to(device) if scaled else None,
        tables.to(device)[:, : max(needed) + 1],
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def launch_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Let decoding launch fewer programs than a GPU has room for.

    Interpreted, each takes milliseconds, also those that find nothing to do.
    """
    from remora.kernels.gpu.attention import decode as kernels

    few = kernels.DecodeLaunch(keys=64, num_warps=4, num_stages=2, programs=4)
    patch.setattr(kernels, "LAUNCHES", {Arch.HOPPER: {64: few, 128: few, 256: few}})
