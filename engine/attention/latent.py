"""Attention over paged latents: one vector per token and layer serves as K and V of all heads
(multi-head latent attention, arXiv:2405.04434).

Runs on every device: `kernels/attention/mla.py` chooses torch or triton. Owns the pages; knows
nothing of page ownership or of how latents are made.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from remora.engine.attention.split_plans import SplitPlans
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.attention.mla import (
    attend_latents,
    extend_over_latents,
    plan_latent_splits,
)
from remora.kernels.memory import buffer
from remora.kernels.rope import apply_rope


class PagedLatents:
    """AttentionBackend of models whose K and V are projections of latents.

    `attend` takes queries, then one latent, as heads: [T, num_heads + 1, C + P]. It rotates the
    last P elements of all of them in place, and returns [T, num_heads, C].

    pages:        [num_layers, num_pages + 1, page_size, C + P]; padding writes to page 0, which
                  holds no sequence
    latent_size:  C
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        row_size: int,
        latent_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        shape = (num_layers, num_pages + 1, page_size, row_size)
        if device == "cpu":
            self.pages = buffer(shape, dtype)
        else:
            self.pages = torch.zeros(shape, dtype=dtype, device=device)
        self.latent_size = latent_size
        self._plans = SplitPlans()

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages in all layers."""
        self.pages.index_copy_(1, targets, self.pages.index_select(1, sources))

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply RoPE, store and attend; see `protocols.AttentionBackend`."""
        pages, size = self.pages[layer], self.latent_size
        rotary = heads[:, :, size:]
        cos, sin = rope.cos, rope.sin
        rotary.copy_(apply_rope(rotary, cos, sin, interleaved=rope.interleaved))
        query, latents = heads[:, :-1], heads[:, -1]
        pages.view(-1, pages.shape[-1]).index_copy_(0, batch.slots, latents)
        out = heads.new_empty((*query.shape[:2], size))
        decodes = slice(0, batch.num_decodes)
        if batch.num_decodes > 0:
            rows = query[decodes], pages, batch.tables[decodes], batch.lengths[decodes]
            make_plan = partial(plan_latent_splits, *rows)
            attend_latents(
                *rows,
                latent_size=size,
                scale=spec.scale,
                plan=self._plans.get(batch, None, make_plan),
                out=out[decodes],
            )
        if batch.num_decodes < len(query):
            extends = slice(batch.num_decodes, None)
            extend_over_latents(
                query,
                pages,
                batch.tables[extends],
                batch.starts[extends],
                batch.lengths[extends],
                latent_size=size,
                scale=spec.scale,
                out=out,
            )
        return out
