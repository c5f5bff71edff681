"""Bidirectional attention within whole rows, without a KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.encoders.config import EncoderConfig
from remora.engine.encoders.distances import Distances
from remora.engine.pooling.rows import RowBatch
from remora.kernels.rope import apply_rope

WINDOW_BLOCK = 256  # queries per call of windowed attention

# From q and k [rows, num_heads, length, head_dim] to [rows or 1, num_heads, length, length].
ScoreBias = Callable[[Tensor, Tensor], Tensor]


class BatchAttention:
    """The attention of one batch, for all layers."""

    def __init__(
        self,
        config: EncoderConfig,
        rows: RowBatch,
        distances: Distances | None,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._rows = rows
        self._rotations = {
            theta: _rotation(rows.positions / config.rope_factor, config.head_dim, theta, dtype)
            for theta in set(config.rope_thetas)
        }
        self._scale = None if distances is None else distances.scale
        self._score_bias = None if distances is None else distances.scores()

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Return the attention output [T, num_heads * head_dim]; `heads` as for `attend_rows`."""
        config, score_bias = self._config, self._score_bias
        if config.rope_thetas:
            cos, sin = self._rotations[config.rope_thetas[layer]]
            rotated = apply_rope(heads[:, :2].flatten(1, 2), cos, sin)
            heads = torch.cat((rotated.view_as(heads[:, :2]), heads[:, 2:]), dim=1)
        if score_bias is None:
            window = config.windows[layer] if config.windows else None
            return attend_rows(heads, self._rows, window)
        return attend_rows(
            heads, self._rows, None, lambda query, key: score_bias(layer, query, key), self._scale
        )


def _rotation(
    positions: Tensor, dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = positions.unsqueeze(1) / theta**exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def attend_rows(
    heads: Tensor,
    rows: RowBatch,
    window: int | None,
    score_bias: ScoreBias | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend from each token to the tokens of its row.

    heads:       [T, 3, num_heads, head_dim]: q, k, v
    window:      maximum distance to either side; None = the whole row, required with a score_bias
    score_bias:  computes values to add to the scores; None = no bias
    scale:       factor on q.k; None = 1 / sqrt(head_dim)
    Returns [T, num_heads * head_dim].
    """
    out = heads.new_empty(heads.shape[0], heads.shape[2], heads.shape[3])
    for start, count, length in rows.groups:
        stop = start + count * length
        # [3, count, num_heads, length, head_dim], without a copy
        group = heads[start:stop].view(count, length, *heads.shape[1:]).permute(2, 0, 3, 1, 4)
        query, key, value = group
        into = out[start:stop].view(count, length, *out.shape[1:]).transpose(1, 2)
        if score_bias is not None:
            bias = score_bias(query, key)
            into.copy_(
                F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
            )
        elif window is None or length <= window + 1:
            into.copy_(F.scaled_dot_product_attention(query, key, value))
        else:
            _attend_window(query, key, value, window, into)
    return out.flatten(1)


def _attend_window(query: Tensor, key: Tensor, value: Tensor, window: int, into: Tensor) -> None:
    """Attend by blocks of queries to the keys within the window. `into` is shaped as `query`."""
    length = query.shape[2]
    for first in range(0, length, WINDOW_BLOCK):
        last = min(first + WINDOW_BLOCK, length)
        low, high = max(0, first - window), min(length, last + window)
        queries = torch.arange(first, last, device=query.device).unsqueeze(1)
        keys = torch.arange(low, high, device=query.device)
        visible = (queries - keys).abs() <= window
        into[:, :, first:last] = F.scaled_dot_product_attention(
            query[:, :, first:last], key[:, :, low:high], value[:, :, low:high], attn_mask=visible
        )
