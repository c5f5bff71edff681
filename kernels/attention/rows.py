"""Attention of one row over its pages in torch, and which pages there are: what kernels for
decoding and extending rows have in common.

Simple rather than quick: it specifies the kernels of `gpu/`, and serves where there are none and
the quicker torch code of `attention_decode` and `attention_prefill` does not cover what is asked.
Legend: n new tokens, S slots of the row, N pages, H heads, K K/V heads, G query heads of a K/V
head, hd elements of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_pages(query: Tensor, kv_pages: Tensor, kv_scales: Tensor | None) -> None:
    """Raise ValueError for queries, pages and scales that do not go together.

    query:      [..., H, hd] float32, float16 or bfloat16; each token's heads in one piece
    kv_pages:   [2, N, page_size, K, hd], in one piece; 0 is K, 1 is V; of the format of `query`, or
                int8, float8_e4m3fn or float8_e5m2
    kv_scales:  [2, N, page_size, K] float32, in one piece, which elements of 8 bits are multiplied
                by; int8 needs them
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
        raise ValueError("pages, and the heads of each query, must lie in one piece")


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
    """Attend the last n tokens of a row to what is before them and to themselves.

    query:     [n, H, hd]
    table:     [pages or more] the row's pages
    length:    tokens of the row, the new ones included
    window:    a query sees the last `window` positions, its own included; None = all
    soft_cap:  c, if scores s are to be c * tanh(s / c); after the scale, before the mask
    sinks:     [H] float32, a further score of each head, which takes part in softmax and brings no
               value
    Returns [n, H, hd] in the format of `query`; sums are float32, or float64 if that is.
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


def first_seen(position: int, window: int | None, chunked: bool) -> int:
    """Return the first position that the query at a position sees.

    chunked:  whether the window begins at multiples of its length, and does not slide
    """
    if window is None:
        return 0
    return position // window * window if chunked else max(0, position + 1 - window)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return softmax of the last dimension.

    sinks:  [..., 1] like the scores, or broadcast to them: of one more score, whose own weight is
            left out
    """
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
