"""Attention by triton kernels on a GPU: three or four launches per layer, without waiting.

Decode steps depend on the device's tensors only, so graphs can capture them. Owns the KV tensors;
knows nothing of page ownership or requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.attention.decode import FIXED_SPLIT_TOKENS, FIXED_SPLITS, attend_decode_paged
from remora.kernels.attention.prefill import attend_extend
from remora.kernels.rope_store import rotate_and_store


class TritonAttention:
    """AttentionBackend of triton kernels.

    kv_pages:     [num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim]; padding writes
                  to page 0, which holds no sequence
    fixed_split:  whether a decode row's bits must not depend on the other rows of its step
    max_splits, split_tokens:  how keys are divided then, see `attend_decode_paged`
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        fixed_split: bool = False,
        max_splits: int = FIXED_SPLITS,
        split_tokens: int = FIXED_SPLIT_TOKENS,
    ) -> None:
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.kv_pages = torch.zeros(shape, dtype=dtype, device=device)
        self._fixed_split = fixed_split
        self._max_splits = max_splits
        self._split_tokens = split_tokens

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store and attend; see `protocols.AttentionBackend`."""
        kv_pages = self.kv_pages[layer]
        num_kv_heads = kv_pages.shape[3]
        query = rotate_and_store(
            heads[:, : -2 * num_kv_heads],
            heads[:, -2 * num_kv_heads : -num_kv_heads],
            heads[:, -num_kv_heads:],
            rope.cos,
            rope.sin,
            kv_pages,
            batch.slots,
            norms=rope.norms,
            eps=rope.eps,
            interleaved=rope.interleaved,
        )
        out = torch.empty_like(query)
        num_decodes = batch.num_decodes
        if num_decodes > 0:
            attend_decode_paged(
                query[:num_decodes],
                kv_pages,
                batch.tables[:num_decodes],
                batch.lengths[:num_decodes],
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                fixed_split=self._fixed_split,
                max_splits=self._max_splits,
                split_tokens=self._split_tokens,
                out=out[:num_decodes],
            )
        if num_decodes < len(query):
            attend_extend(
                query,
                kv_pages,
                batch.tables[num_decodes:],
                batch.starts[num_decodes:],
                batch.lengths[num_decodes:],
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                out=out,
            )
        return out
