"""Attention by triton kernels on a GPU: three or four launches per layer, without waiting,
and one per step that divides the keys of decode rows.

Decode steps depend on the device's tensors only, so graphs can capture them. Knows nothing of page
ownership or requests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from remora.engine.attention.paged_kv import PagedKV
from remora.engine.attention.split_plans import SplitPlans
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.attention.decode import (
    FIXED_SPLIT_TOKENS,
    FIXED_SPLITS,
    attend_decode_paged,
    plan_splits,
)
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
        self._splits: dict[str, Any] = {
            "fixed_split": fixed_split,
            "max_splits": max_splits,
            "split_tokens": split_tokens,
        }
        self._plans = SplitPlans()

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store and attend; see `protocols.AttentionBackend`."""
        query, kv_pages = self.store(layer, heads, rope, batch), self.kv_pages[layer]
        scales = None if self.scales is None else self.scales[layer]
        out = torch.empty_like(query)
        num_decodes = batch.num_decodes
        if num_decodes > 0:
            rows = (
                query[:num_decodes],
                kv_pages,
                batch.tables[:num_decodes],
                batch.lengths[:num_decodes],
            )
            make_plan = partial(plan_splits, *rows, window=spec.window, **self._splits)
            attend_decode_paged(
                *rows,
                scale=spec.scale,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                kv_scales=scales,
                plan=self._plans.get(batch, spec.window, make_plan),
                out=out[:num_decodes],
                **self._splits,
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
                kv_scales=scales,
                out=out,
            )
        return out
