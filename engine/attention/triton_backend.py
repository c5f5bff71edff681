"""Attention by triton kernels on a GPU: three or four launches per layer, without waiting.

Decode steps depend on the device's tensors only, so graphs can capture them. Knows nothing of page
ownership or requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remora.engine.attention.paged_kv import PagedKV
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.attention.decode import FIXED_SPLIT_TOKENS, FIXED_SPLITS, attend_decode_paged
from remora.kernels.attention.prefill import attend_extend


class TritonAttention(PagedKV):
    """AttentionBackend of triton kernels.

    fixed_split:  whether a decode row's bits must not depend on the other rows of its step
    max_splits, split_tokens:  how keys are divided then, see `attend_decode_paged`
    """

    def __init__(
        self,
        *,
        fixed_split: bool = False,
        max_splits: int = FIXED_SPLITS,
        split_tokens: int = FIXED_SPLIT_TOKENS,
        **pages: Any,
    ) -> None:
        super().__init__(**pages)
        self._fixed_split = fixed_split
        self._max_splits = max_splits
        self._split_tokens = split_tokens

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store and attend; see `protocols.AttentionBackend`."""
        query, kv_pages = self.store(layer, heads, rope, batch), self.kv_pages[layer]
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
