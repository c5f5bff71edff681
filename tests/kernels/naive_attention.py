"""Paged attention, one query and one head at a time: what the kernels must agree with."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_naively(
    query: Tensor,
    kv_pages: Tensor,
    table: list[int],
    at: int,
    *,
    scale: float,
    window: int | None,
    chunked: bool = False,
) -> Tensor:
    """Attend the query [num_heads, head_dim] at position `at` of one sequence, in float64."""
    page_size, num_kv_heads = kv_pages.shape[2:4]
    group = len(query) // num_kv_heads
    first = 0 if window is None else max(0, at + 1 - window)
    while chunked and window is not None and first // window < at // window:
        first += 1
    slots = [(table[position // page_size], position % page_size) for position in range(at + 1)]
    heads = []
    for head, vector in enumerate(query.double()):
        key, value = (
            torch.stack([kv[page, offset, head // group] for page, offset in slots[first:]])
            for kv in kv_pages.double()
        )
        heads.append(torch.softmax(key @ vector * scale, 0) @ value)
    return torch.stack(heads)
