"""Causal attention of runs of new tokens over the pages of their sequences.

`attend_extend` is one call for all rows; with Triton it runs the kernel of
`gpu/attention/prefill.py`. On a CPU `attend_prefill`, one call per row, is faster: it computes
queries in blocks, so that scores stay within a fixed memory budget for any context length, and
skips keys after a block's last query and before its first query's window.

Legend: T new tokens, E rows, N queries of a block, S keys of a block, K K/V heads, G query heads
per K/V head, H head_dim.
"""

from __future__ import annotations

from itertools import pairwise
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
from remora.kernels.dispatch import by_triton

SCORE_BUDGET = 2**20  # elements of a block's scores: 4 MB in float32, within a core's cache
MIN_QUERIES, MAX_QUERIES = 16, 256


def attend_extend(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend the last tokens of each row to all its tokens, causally.

    query:      [T, num_heads, head_dim], any token stride
    kv_pages:   [2, num_pages, page_size, num_kv_heads, head_dim]; already holds K and V of the new
                tokens; slots past a row's end may hold anything
    tables:     [E, max_pages] int32, any row stride; entries past a row's last page are not read
    starts:     [E + 1] int32 ascending: each row's first token, then the end; rows may be empty,
                and tokens outside of [starts[0], starts[E]) belong to no row
    lengths:    [E] int32, tokens of each row, including the new ones
    window:     a query sees the last `window` positions, including its own; None = all
    soft_cap:   c of scores c * tanh(s / c), after the scale and before the mask; None = no cap
    sinks:      [num_heads] float32, an extra score of each head that takes part in softmax and has
                no value
    kv_scales:  [2, num_pages, page_size, num_kv_heads] bfloat16 or float32, of 8-bit pages
    out:        [T, num_heads, head_dim] to overwrite, any token stride; None = new memory
    Returns [T, num_heads, head_dim] in the format of `query`, `out` if given; tokens of no row are
    not written. Raises ValueError as `attend_decode_paged` does.
    """
    check_pages(query, kv_pages, kv_scales)
    if out is None:
        out = query.new_empty(query.shape)
    options: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
    }
    if not by_triton(query.device):
        attend_extend_reference(
            query, kv_pages, tables, starts, lengths, kv_scales=kv_scales, out=out, **options
        )
    elif len(query) > 0 and len(lengths) > 0:
        from remora.kernels.gpu.attention import prefill as kernels

        kernels.attend(query, kv_pages, tables, starts, lengths, kv_scales, out, **options)
    return out


def attend_extend_reference(
    query: Tensor,
    kv_pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    out: Tensor,
    **options: Any,
) -> None:
    """`attend_extend` in torch, row by row; `options` as in `attend_row`."""
    for row, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start < stop:
            out[start:stop] = attend_row(
                query[start:stop], kv_pages, tables[row], int(lengths[row]), **options
            )


def attend_prefill(
    query: Tensor,
    kv_pages: Tensor,
    block_table: Tensor,
    *,
    context_len: int,
    scale: float,
    window: int | None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attend the last T tokens of one sequence to all its tokens, causally.

    query:        [T, num_heads, head_dim]
    kv_pages:     [2, num_pages, page_size, num_kv_heads, head_dim]; already holds K and V of the
                  new tokens
    block_table:  [>= pages of the sequence] int32
    context_len:  tokens of the sequence, including the new ones
    window:       a query sees the last `window` positions, including its own; None = all
    chunked:      a query sees the positions since the last multiple of `window` instead
    soft_cap, sinks:  as in `attend_extend`
    slopes:       [num_heads] float32, decrease of the score per position of distance (ALiBi)
    kv_scales:    [2, num_pages, page_size, num_kv_heads] of 8-bit pages
    Returns [T, num_heads, head_dim] in the dtype of `query`; softmax is float32.
    """
    num_tokens, num_heads, head_dim = query.shape
    page_size, num_kv_heads = kv_pages.shape[2:4]
    start = context_len - num_tokens
    first_page = first_seen(start, window, chunked) // page_size
    offset = first_page * page_size
    pages = block_table[first_page : -(-context_len // page_size)]
    gathered = gather_pages(kv_pages, kv_scales, pages, query.dtype)
    gathered = gathered.view(2, -1, num_kv_heads, head_dim)
    key_KSH, value_KSH = gathered[:, : context_len - offset].transpose(1, 2).contiguous()
    query_KTGH = (query * scale).view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1)
    options: dict[str, Any] = {
        "soft_cap": soft_cap,
        "sinks_K1G1": None if sinks is None else sinks.view(num_kv_heads, 1, -1, 1),
        "slopes_K1G1": None if slopes is None else slopes.view(num_kv_heads, 1, -1, 1),
    }

    out = torch.empty_like(query)
    out_TKGH = out.view(num_tokens, num_kv_heads, -1, head_dim)
    step = min(MAX_QUERIES, max(MIN_QUERIES, SCORE_BUDGET // (num_heads * context_len)))
    for block in range(0, num_tokens, step):
        stop = min(block + step, num_tokens)
        # Positions of this block's queries are [low, high); it sees keys [seen, high).
        low, high = start + block, start + stop
        seen = max(offset, first_seen(low, window, chunked))
        keys = slice(seen - offset, high - offset)
        begins = None
        if window is not None:
            at = torch.arange(low, high, device=query.device)
            begins = (at // window * window if chunked else at + 1 - window) - seen
        attended_KNGH = _attend_block(
            query_KTGH[:, block:stop], key_KSH[:, keys], value_KSH[:, keys], begins, **options
        )
        out_TKGH[block:stop] = attended_KNGH.transpose(0, 1)
    return out


def _attend_block(
    query_KNGH: Tensor,
    key_KSH: Tensor,
    value_KSH: Tensor,
    begins: Tensor | None,
    *,
    soft_cap: float | None,
    sinks_K1G1: Tensor | None,
    slopes_K1G1: Tensor | None,
) -> Tensor:
    """Attend a block of queries whose last query has the position of the last key.

    begins:  [N] first key that each query sees; None = all queries see the first key
    """
    num_kv_heads, num_queries, group, head_dim = query_KNGH.shape
    num_keys = key_KSH.shape[1]
    rows_KRH = query_KNGH.reshape(num_kv_heads, num_queries * group, head_dim)
    scores_KRS = (rows_KRH @ key_KSH.transpose(1, 2)).float()

    scores_KNGS = scores_KRS.view(num_kv_heads, num_queries, group, num_keys)
    at_S = torch.arange(num_keys, device=key_KSH.device)
    if soft_cap is not None:
        scores_KNGS = soft_cap * torch.tanh(scores_KNGS / soft_cap)
    if slopes_K1G1 is not None:
        # Softmax is invariant to a row's constant offset, so absolute key positions do.
        scores_KNGS += slopes_K1G1 * at_S
    first = num_keys - num_queries
    ahead = torch.ones(num_queries, num_queries, dtype=torch.bool, device=key_KSH.device).triu_(1)
    scores_KNGS[..., first:].masked_fill_(ahead[:, None, :], float("-inf"))
    if begins is not None:
        behind = at_S < begins.unsqueeze(1)
        scores_KNGS.masked_fill_(behind[:, None, :], float("-inf"))

    weights_KNGS = softmax_with_sinks(scores_KNGS, sinks_K1G1).to(value_KSH.dtype)
    return (weights_KNGS.reshape(scores_KRS.shape) @ value_KSH).view(query_KNGH.shape)
