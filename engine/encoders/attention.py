"""Attention of whole rows among themselves, in both directions; nothing is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.encoders.config import EncoderConfig
from remora.engine.encoders.distances import Distances
from remora.engine.pooling.rows import RowBatch
from remora.kernels.rope import apply_rope

WINDOW_BLOCK = 256  # queries that look at a window's keys at a time

# From q and k [rows, num_heads, length, head_dim] to [rows or 1, num_heads, length, length].
Summands = Callable[[Tensor, Tensor], Tensor]


class BatchAttention:
    """How the tokens of one batch look at each other, in every layer."""

    def __init__(
        self,
        config: EncoderConfig,
        rows: RowBatch,
        distances: Distances | None,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._rows = rows
        self._turns = {
            theta: _turns(rows.positions / config.rope_factor, config.head_dim, theta, dtype)
            for theta in set(config.rope_thetas)
        }
        self._scale = None if distances is None else distances.scale
        self._scores = None if distances is None else distances.scores()

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Return what tokens see [T, num_heads * head_dim]; `heads` are as for `attend_rows`."""
        config, scores = self._config, self._scores
        if config.rope_thetas:
            cos, sin = self._turns[config.rope_thetas[layer]]
            apply_qk_norm_rope = apply_rope(heads[:, :2].flatten(1, 2), cos, sin)
            heads = torch.cat((apply_qk_norm_rope.view_as(heads[:, :2]), heads[:, 2:]), dim=1)
        if scores is None:
            window = config.windows[layer] if config.windows else None
            return attend_rows(heads, self._rows, window)
        return attend_rows(
            heads, self._rows, None, lambda query, key: scores(layer, query, key), self._scale
        )


def _turns(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = positions.unsqueeze(1) / theta**exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attend_rows(
    heads: Tensor,
    rows: RowBatch,
    window: int | None,
    summands: Summands | None = None,
    scale: float | None = None,
) -> Tensor:
    """Let each token attend to the tokens of its row.

    heads:     [T, 3, num_heads, head_dim]: q, k, v
    window:    how far to each side it sees; None = all of the row, as it must be with summands
    summands:  what scores get besides; None = nothing
    scale:     factor on q.k; None = 1 / sqrt(head_dim)
    Returns [T, num_heads * head_dim].
    """
    out = heads.new_empty(heads.shape[0], heads.shape[2], heads.shape[3])
    for start, count, length in rows.groups:
        stop = start + count * length
        # [3, count, num_heads, length, head_dim], without a copy
        group = heads[start:stop].view(count, length, *heads.shape[1:]).permute(2, 0, 3, 1, 4)
        query, key, value = group
        into = out[start:stop].view(count, length, *out.shape[1:]).transpose(1, 2)
        if summands is not None:
            added = summands(query, key)
            into.copy_(
                F.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)
            )
        elif window is None or length <= window + 1:
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
