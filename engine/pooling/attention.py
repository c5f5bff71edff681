"""Attention of a decoder over whole rows, without a KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.attention.torch_backend import apply_qk_norm_rope
from remora.engine.pooling.rows import RowBatch
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope


class RowsAttention:
    """The AttentionBackend of one batch of rows."""

    def __init__(self, rows: RowBatch, *, num_heads: int) -> None:
        self._rows = rows
        self._num_heads = num_heads

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, and attend; see `protocols.AttentionBackend`."""
        heads, value = apply_qk_norm_rope(heads, self._num_heads, rope)
        query, key = heads[:, : self._num_heads], heads[:, self._num_heads :]
        out = torch.empty_like(query)
        for start, count, length in self._rows.groups:
            part = slice(start, start + count * length)
            q, k, v = (
                each[part].view(count, length, *each.shape[1:]).transpose(1, 2)
                for each in (query, key, value)
            )
            attended = _attend(q, k, v, spec)
            out[part].view(count, length, *out.shape[1:]).transpose(1, 2).copy_(attended)
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend within rows of equal length; all tensors are [rows, heads, length, head_dim]."""
    length = query.shape[2]
    is_near = spec.window is None or spec.window >= length
    is_plain = spec.soft_cap is None and spec.sinks is None and spec.slopes is None
    if is_plain and is_near:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=not spec.both_ways, scale=spec.scale, enable_gqa=True
        )
    at = torch.arange(length, device=query.device)
    distance = at.unsqueeze(1) - at
    near = distance.abs() if spec.both_ways else distance
    visible = (near >= 0) & (near < (length if spec.window is None else spec.window))
    if spec.chunked and spec.window is not None:
        chunk = at // spec.window
        visible &= chunk.unsqueeze(1) == chunk
    if is_plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=spec.scale, enable_gqa=True
        )
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3)).float() * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if spec.slopes is not None:
        scores = scores - spec.slopes.view(-1, 1, 1) * distance
    scores = scores.masked_fill(~visible, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=3)
    weights = scores.softmax(3)[..., :length]
    return weights.to(value.dtype) @ value
