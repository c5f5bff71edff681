"""The KV pages of a GPU's attention backends, and what all of them do before they attend.

Knows nothing of page ownership or of how a backend attends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.runner.batch import ForwardBatch, QKNormRope
from remora.kernels.kv_store import SCALE_DTYPE
from remora.kernels.rope_store import rotate_and_store


class PagedKV:
    """K and V of all layers.

    kv_pages:  [num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim]; padding writes to
               page 0, which holds no sequence. Zeroed, because libraries may multiply unwritten
               slots by 0.
    scales:    [num_layers, 2, num_pages + 1, page_size, num_kv_heads], of quantised K and V
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
        kv_dtype: torch.dtype | None = None,
        static_scales: Tensor | None = None,
    ) -> None:
        """See `kernels/kv_store.py`.

        kv_dtype:       of quantised K and V; None = `dtype`
        static_scales:  [num_layers, 2, num_kv_heads]; None = each token has its own
        """
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.kv_pages = torch.zeros(shape, dtype=kv_dtype or dtype, device=device)
        self.scales: Tensor | None = None
        if kv_dtype is not None:
            self.scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device)
        self._static_scales = None if static_scales is None else static_scales.to(device)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages in all layers."""
        copy_kv_pages(self.kv_pages, self.scales, sources, targets)

    def store(self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch) -> Tensor:
        """Apply QK norm and RoPE, store K and V; return the queries [T, num_heads, head_dim].

        heads:  as in `protocols.AttentionBackend`
        """
        kv_pages = self.kv_pages[layer]
        num_kv_heads = kv_pages.shape[3]
        return rotate_and_store(
            heads[:, : -2 * num_kv_heads],
            heads[:, -2 * num_kv_heads : -num_kv_heads],
            heads[:, -num_kv_heads:],
            rope.cos,
            rope.sin,
            kv_pages,
            batch.slots,
            scales=None if self.scales is None else self.scales[layer],
            static_scales=None if self._static_scales is None else self._static_scales[layer],
            norms=rope.norms,
            eps=rope.eps,
            interleaved=rope.interleaved,
        )


def copy_kv_pages(
    kv_pages: Tensor, scales: Tensor | None, sources: Tensor, targets: Tensor
) -> None:
    """Copy pages [M], and their scales, to pages [M], in all layers.

    kv_pages, scales:  as of `PagedKV`
    """
    for stored in (kv_pages, scales):
        if stored is not None:
            # As bytes: not every device can index every number format.
            pages = stored.view(torch.uint8)
            pages.index_copy_(2, targets, pages.index_select(2, sources))
