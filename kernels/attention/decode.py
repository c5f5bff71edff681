"""Attention of one new token per sequence over its pages.

`attend_decode_paged` is one call; with Triton it runs the kernels of `gpu/attention/decode.py`.
On a CPU two calls are faster: `plan_decode` runs once per step, `attend_decode` once per layer. The
plan groups rows of similar length (within a factor of two in pages), so that short rows are not
padded to the longest one, bounds the slots gathered at a time, and skips pages before the sliding
window.

Query heads that share a K/V head become rows of one matrix product; K and V are never repeated.
Legend: D decode rows, B rows of a bucket, S slots gathered per row, K K/V heads, G query heads per
K/V head, H head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remora.kernels.attention.rows import (
    attend_row,
    check_pages,
    first_seen,
    gather_pages,
    softmax_with_sinks,
)
from remora.kernels.attention.split_plan import SplitPlan
from remora.kernels.dispatch import by_triton

FIXED_SPLITS, FIXED_SPLIT_TOKENS = 32, 512


def plan_splits(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    window: int | None,
    fixed_split: bool = False,
    max_splits: int = FIXED_SPLITS,
    split_tokens: int = FIXED_SPLIT_TOKENS,
) -> SplitPlan | None:
    """Divide the keys of rows for `attend_decode_paged`; arguments as there.

    Returns a plan for all layers of a step with the same window, shapes and formats; None where
    Triton does not compute.
    """
    if not by_triton(query.device):
        return None
    from remora.kernels.gpu.attention import decode as kernels

    return kernels.plan(
        query,
        kv_pages,
        tables,
        lengths,
        window=window,
        fixed_split=fixed_split,
        max_splits=max_splits,
        split_tokens=split_tokens,
    )


def attend_decode_paged(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
    fixed_split: bool = False,
    max_splits: int = FIXED_SPLITS,
    split_tokens: int = FIXED_SPLIT_TOKENS,
    plan: SplitPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each decode token to the pages of its own row.

    query:        [D, num_heads, head_dim], any token stride
    kv_pages:     [2, num_pages, page_size, num_kv_heads, head_dim]; slots past a row's end may hold
                  anything
    tables:       [D, max_pages] int32, any row stride; entries past a row's last page are not read
    lengths:      [D] int32, tokens of each row including the query's; length 0 yields zeros
    window:       a query sees the last `window` positions, including its own; None = all
    soft_cap:     c of scores c * tanh(s / c), after the scale and before the mask; None = no cap
    sinks:        [num_heads] float32, an extra score of each head that takes part in softmax and
                  has no value
    kv_scales:    [2, num_pages, page_size, num_kv_heads] bfloat16 or float32, of 8-bit pages
    fixed_split:  batch-invariant: a row's keys are always divided into parts of `split_tokens`, or
                  longer ones so that there are at most `max_splits`
    plan:         from `plan_splits` with the same arguments; None = it is made here
    out:          [D, num_heads, head_dim] to overwrite, any token stride; None = new memory
    Returns [D, num_heads, head_dim] in the format of `query`, `out` if given. Raises ValueError for
    formats and shapes that `check_pages` refuses, and for float8_e4m3fn on GPUs that cannot convert
    it (NVIDIA before compute capability 8.9, AMD).
    """
    check_pages(query, kv_pages, kv_scales)
    if out is None:
        out = query.new_empty(query.shape)
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    if not by_triton(query.device):
        options |= {"kv_scales": kv_scales, "window": window}
        return out.copy_(attend_decode_paged_reference(query, kv_pages, tables, lengths, **options))
    from remora.kernels.gpu.attention import decode as kernels

    if len(query) > 0:
        plan = plan or kernels.plan(
            query,
            kv_pages,
            tables,
            lengths,
            window=window,
            fixed_split=fixed_split,
            max_splits=max_splits,
            split_tokens=split_tokens,
        )
        kernels.attend(query, kv_pages, tables, kv_scales, out, plan=plan, **options)
    return out


def attend_decode_paged_reference(
    query: Tensor, kv_pages: Tensor, tables: Tensor, lengths: Tensor, **options: Any
) -> Tensor:
    """`attend_decode_paged` in torch, row by row; `options` as in `attend_row`."""
    out = torch.zeros_like(query)
    for row, length in enumerate(lengths.tolist()):
        if length > 0:
            out[row] = attend_row(query[row : row + 1], kv_pages, tables[row], length, **options)[0]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBucket:
    """Rows that are computed together.

    rows:       [B] int64 indices into the decode rows; None = all of them, in order
    page_ids:   [B * S / page_size] int32, row after row
    num_rows:   B
    num_slots:  slots used of each row; the rest of the last page is cut off
    positions:  [B, 1, 1, num_slots], positions of the slots
    bias:       [B, 1, 1, num_slots] float32, 0 for visible slots and -inf for others; None = all
                slots are visible
    """

    rows: Tensor | None
    page_ids: Tensor
    num_rows: int
    num_slots: int
    positions: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Buckets of one step's decode rows for one window; shared by all layers."""

    buckets: tuple[DecodeBucket, ...]


def plan_decode(
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    page_size: int,
    window: int | None,
    chunked: bool = False,
    max_slots: int,
) -> DecodePlan:
    """Group the decode rows by length.

    block_tables:  [D, max_pages] int32; entries past a row's last page are not read
    context_lens:  [D] int32, tokens of each row including the query's
    window:        a query sees the last `window` positions, including its own; None = all
    chunked:       a query sees the positions since the last multiple of `window` instead
    max_slots:     most slots to gather at a time; a single row may have more
    """
    lens = context_lens.tolist()
    seen = [first_seen(length - 1, window, chunked) for length in lens]
    firsts = [begin // page_size for begin in seen]
    num_pages = [
        -(-length // page_size) - first for length, first in zip(lens, firsts, strict=True)
    ]
    return DecodePlan(
        tuple(
            _plan_bucket(rows, lens, seen, block_tables, page_size)
            for rows in _group_rows(num_pages, max_slots // page_size)
        )
    )


def _group_rows(num_pages: list[int], max_pages: int) -> list[list[int]]:
    """Group rows within a factor of two, up to `max_pages` together, or one longer row."""
    by_size: dict[int, list[int]] = {}
    for row, count in enumerate(num_pages):
        by_size.setdefault(count.bit_length(), []).append(row)
    groups: list[list[int]] = []
    for rows in by_size.values():
        together = max(1, max_pages // max(num_pages[row] for row in rows))
        groups += [rows[at : at + together] for at in range(0, len(rows), together)]
    return groups


def _plan_bucket(
    rows: list[int],
    lens: list[int],
    seen: list[int],
    block_tables: Tensor,
    page_size: int,
) -> DecodeBucket:
    device = block_tables.device
    firsts = [begin // page_size for begin in seen]
    num_slots = max(lens[row] - firsts[row] * page_size for row in rows)
    num_pages = -(-num_slots // page_size)
    index = None
    if len(rows) < len(lens):
        index = torch.tensor(rows, device=device)
        block_tables = block_tables.index_select(0, index)
    first = torch.tensor([firsts[row] for row in rows], device=device).unsqueeze(1)
    columns = first + torch.arange(num_pages, device=device)
    columns = columns.clamp_(max=block_tables.shape[1] - 1)
    page_ids = block_tables.gather(1, columns)

    bias = None
    length = torch.tensor([lens[row] for row in rows], device=device).unsqueeze(1)
    position = first * page_size + torch.arange(num_slots, device=device)
    hidden = position >= length
    if any(seen):
        hidden |= position < torch.tensor([seen[row] for row in rows], device=device).unsqueeze(1)
    if hidden.any():
        bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        bias = bias[:, None, None, :]
    return DecodeBucket(
        rows=index,
        page_ids=page_ids.flatten(),
        num_rows=len(rows),
        num_slots=num_slots,
        positions=position[:, None, None, :],
        bias=bias,
    )


def attend_decode(
    query: Tensor,
    kv_pages: Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attend each decode token to the pages of its own sequence.

    query:     [D, num_heads, head_dim]
    kv_pages:  [2, num_pages, page_size, num_kv_heads, head_dim]; 0 is K, 1 is V; finite everywhere
    plan:      made for these rows and the layer's window
    soft_cap, sinks:  as in `attend_decode_paged`
    slopes:    [num_heads] float32, decrease of the score per position of distance (ALiBi)
    kv_scales: [2, num_pages, page_size, num_kv_heads] of 8-bit pages
    Returns [D, num_heads, head_dim] in the dtype of `query`; softmax is float32.
    """
    num_kv_heads = kv_pages.shape[3]
    options: dict[str, Any] = {
        "kv_scales": kv_scales,
        "scale": scale,
        "soft_cap": soft_cap,
        "sinks_KG1": None if sinks is None else sinks.view(num_kv_heads, -1, 1),
        "slopes_KG1": None if slopes is None else slopes.view(num_kv_heads, -1, 1),
    }
    if len(plan.buckets) == 1:
        return _attend_bucket(query, kv_pages, plan.buckets[0], **options)
    out = torch.empty_like(query)
    for bucket in plan.buckets:
        rows = bucket.rows
        assert rows is not None
        out[rows] = _attend_bucket(query.index_select(0, rows), kv_pages, bucket, **options)
    return out


def _attend_bucket(
    query: Tensor,
    kv_pages: Tensor,
    bucket: DecodeBucket,
    *,
    kv_scales: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks_KG1: Tensor | None,
    slopes_KG1: Tensor | None,
) -> Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_pages.shape[3]
    gathered = gather_pages(kv_pages, kv_scales, bucket.page_ids, query.dtype)
    # One copy to head-major order is cheaper than the transposing copies of the two products.
    slots = gathered.view(2, num_rows, -1, num_kv_heads, head_dim)[:, :, : bucket.num_slots]
    key_BKSH, value_BKSH = slots.transpose(2, 3).contiguous()
    query_BKGH = (query * scale).view(num_rows, num_kv_heads, -1, head_dim)
    scores_BKGS = (query_BKGH @ key_BKSH.transpose(2, 3)).float()
    if soft_cap is not None:
        scores_BKGS = soft_cap * torch.tanh(scores_BKGS / soft_cap)
    if slopes_KG1 is not None:
        # Softmax is invariant to a row's constant offset, so absolute key positions do.
        scores_BKGS += slopes_KG1 * bucket.positions
    if bucket.bias is not None:
        scores_BKGS += bucket.bias
    weights_BKGS = softmax_with_sinks(scores_BKGS, sinks_KG1).to(query.dtype)
    out_BKGH: Tensor = weights_BKGS @ value_BKSH
    return out_BKGH.view(num_rows, num_heads, head_dim)
