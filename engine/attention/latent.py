"""Attention over pages of latents: one vector for each token and layer, which is K and V of all
heads (multi-head latent attention, arXiv:2405.04434).

Computes on every device: `kernels/attention/mla.py` chooses torch or triton. Owns the pages, as
`attention.py` does; knows nothing of who owns which page, nor how latents are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.attention.mla import attend_latents, extend_over_latents
from remora.kernels.memory import buffer
from remora.kernels.rope import apply_rope


class PagedLatents:
    """AttentionBackend of models whose K and V are made of latents.

    What it is given as heads are queries, then one latent: [T, num_heads + 1, C + P]. The last P
    elements of all of them are rotated, in place; it returns [T, num_heads, C].

    pages:        [num_layers, num_pages + 1, page_size, C + P]; page 0 takes what padding writes
                  and holds no sequence
    latent_size:  C
    fixed_split:  whether a row that decodes must be the same bits whichever rows are beside it
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
        fixed_split: bool = False,
    ) -> None:
        shape = (num_layers, num_pages + 1, page_size, row_size)
        on_cpu = device == "cpu"
        self.pages = (
            buffer(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.latent_size = latent_size
        self._fixed_split = fixed_split

    def attend(
        self, layer: int, heads: Tensor, turn: QKNormRope, batch: ForwardBatch, rule: AttentionSpec
    ) -> Tensor:
        """Turn, store and attend; see `protocols.AttentionBackend`."""
        pages, size = self.pages[layer], self.latent_size
        apply_qk_norm_rope = heads[:, :, size:]
        apply_qk_norm_rope.copy_(
            apply_rope(apply_qk_norm_rope, turn.cos, turn.sin, interleaved=turn.interleaved)
        )
        query, latents = heads[:, :-1], heads[:, -1]
        pages.view(-1, pages.shape[-1]).index_copy_(0, batch.slots, latents)
        out = heads.new_empty((*query.shape[:2], size))
        decodes = slice(0, batch.num_decodes)
        if batch.num_decodes > 0:
            attend_latents(
                query[decodes],
                pages,
                batch.tables[decodes],
                batch.lengths[decodes],
                latent_size=size,
                scale=rule.scale,
                fixed_split=self._fixed_split,
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
                scale=rule.scale,
                out=out,
            )
        return out
