"""Attention of whole rows among themselves, in both directions; nothing is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.pooling.rows import RowBatch

WINDOW_BLOCK = 256  # queries that look at a window's keys at a time


def attend_rows(heads: Tensor, rows: RowBatch, window: int | None) -> Tensor:
    """Let each token attend to the tokens of its row.

    heads:   [T, 3, num_heads, head_dim]: q, k, v
    window:  how far to each side it sees; None = all of the row
    Returns [T, num_heads * head_dim].
    """
    out = heads.new_empty(heads.shape[0], heads.shape[2], heads.shape[3])
    for start, count, length in rows.groups:
        stop = start + count * length
        # [3, count, num_heads, length, head_dim], without a copy
        group = heads[start:stop].view(count, length, *heads.shape[1:]).permute(2, 0, 3, 1, 4)
        query, key, value = group
        into = out[start:stop].view(count, length, *out.shape[1:]).transpose(1, 2)
        if window is None or length <= window + 1:
            into.copy_(F.scaled_dot_product_attention(query, key, value))
        else:
            _attend_near(query, key, value, window, into)
    return out.flatten(1)


def _attend_near(query: Tensor, key: Tensor, value: Tensor, window: int, into: Tensor) -> None:
    """Attend block by block to the keys that its queries can see. `into` is like `query`."""
    length = query.shape[2]
    for first in range(0, length, WINDOW_BLOCK):
        last = min(first + WINDOW_BLOCK, length)
        low, high = max(0, first - window), min(length, last + window)
        queries = torch.arange(first, last, device=query.device).unsqueeze(1)
        keys = torch.arange(low, high, device=query.device)
        sees = (queries - keys).abs() <= window
        into[:, :, first:last] = F.scaled_dot_product_attention(
            query[:, :, first:last], key[:, :, low:high], value[:, :, low:high], attn_mask=sees
        )
