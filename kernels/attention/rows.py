"""Reference attention of one row over its pages in torch, and checks of page formats.

Simple rather than fast: it specifies the kernels of `gpu/attention`, and computes options that the
faster torch code of `decode.py` and `prefill.py` does not cover.

Legend: n new tokens, S slots of the row, N pages, H heads, K K/V heads, G query heads of a K/V
head, hd elements of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_pages(query: Tensor, kv_pages: Tensor, kv_scales: Tensor | None) -> None:
    """Raise ValueError for incompatible queries, pages and scales.

    query:      [..., H, hd] float32, float16 or bfloat16; each token's heads contiguous
    kv_pages:   [2, N, page_size, K, hd] contiguous; 0 is K, 1 is V; in the format of `query`, int8,
                float8_e4m3fn or float8_e5m2
    kv_scales:  [2, N, page_size, K] bfloat16 or float32 contiguous, factors of 8-bit elements;
                required for int8
    """
    narrow = (torch.int8, *FLOAT8)
    if kv_pages.dtype not in (query.dtype, *narrow):
        raise ValueError(f"pages of {kv_pages.dtype} for queries of {query.dtype}")
    if kv_pages.shape[-1] != query.shape[-1] or query.shape[-2] % kv_pages.shape[3]:
        raise ValueError(
            f"pages of {list(kv_pages.shape)} for queries of {list(query.shape)}: heads differ"
        )
    if kv_scales is None and kv_pages.dtype is torch.int8:
        raise ValueError("pages of int8 need scales")
    if kv_scales is not None and kv_pages.dtype not in narrow:
        raise ValueError(f"scales for pages of {kv_pages.dtype}")
    if kv_scales is not None and kv_scales.shape != kv_pages.shape[:-1]:
        raise ValueError(f"scales of {list(kv_scales.shape)} for pages of {list(kv_pages.shape)}")
    heads_stride, element_stride = query.stride()[-2:]
    if not kv_pages.is_contiguous() or (heads_stride, element_stride) != (query.shape[-1], 1):
        raise ValueError("pages, and the heads of each query, must be contiguous")


def attend_row(
    query: Tensor,
    kv_pages: Tensor,
    table: Tensor,
    length: int,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attend the last n tokens of a row to all its tokens, causally.

    query:     [n, H, hd]
    table:     [>= pages of the row], page ids
    length:    tokens of the row, including the new ones
    window:    a query sees the last `window` positions, including its own; None = all
    soft_cap:  c of scores c * tanh(s / c), after the scale and before the mask; None = no cap
    sinks:     [H] float32, an extra score of each head that takes part in softmax and has no value
    Returns [n, H, hd] in the format of `query`; sums are float32, or float64 for float64 queries.
    """
    count, _, head_dim = query.shape
    page_size, num_kv_heads = kv_pages.shape[2:4]
    exact = torch.promote_types(query.dtype, torch.float32)
    pages = table[: -(-length // page_size)].long()
    slots = kv_pages[:, pages].flatten(1, 2)[:, :length].to(exact)
    if kv_scales is not None:
        slots = slots * kv_scales[:, pages].flatten(1, 2)[:, :length, :, None].to(exact)
    key_KSH, value_KSH = slots.transpose(1, 2)
    query_KGnH = query.to(exact).view(count, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores_KGnS = query_KGnH @ key_KSH.transpose(1, 2).unsqueeze(1) * scale
    if soft_cap is not None:
        scores_KGnS = soft_cap * torch.tanh(scores_KGnS / soft_cap)
    at = torch.arange(length, device=query.device)
    own = at[length - count :].unsqueeze(1)
    is_hidden = at > own
    if window is not None:
        is_hidden |= at <= own - window
    scores_KGnS = scores_KGnS.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, -1, 1, 1).to(exact)
    weights_KGnS = softmax_with_sinks(scores_KGnS, sinks)
    attended_KGnH: Tensor = weights_KGnS @ value_KSH.unsqueeze(1)
    return attended_KGnH.permute(2, 0, 1, 3).reshape(query.shape).to(query.dtype)


def gather_pages(
    kv_pages: Tensor, kv_scales: Tensor | None, pages: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return K and V of these pages in `dtype`, [2, len(pages), page_size, K, hd].

    kv_scales:  [2, N, page_size, K], by which 8-bit elements are multiplied
    """
    if kv_scales is None:
        return kv_pages.index_select(1, pages)
    # As bytes: torch has no indexed copy of 8-bit floats.
    codes = kv_pages.view(torch.uint8).index_select(1, pages).view(kv_pages.dtype)
    scales = kv_scales.index_select(1, pages).float()
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)


def first_seen(position: int, window: int | None, chunked: bool) -> int:
    """Return the first position that the query at a position sees.

    chunked:  the window begins at multiples of its length instead of sliding
    """
    if window is None:
        return 0
    return position // window * window if chunked else max(0, position + 1 - window)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension.

    sinks:  [..., 1], an extra score, broadcast to the others; its weight is not returned
    """
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
