"""Attention over paged KV memory by torch operations.

Owns the KV tensors. Knows nothing of page ownership or requests.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from remora.engine.attention.paged_kv import copy_kv_pages
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.kernels.attention.decode import DecodePlan, attend_decode, plan_decode
from remora.kernels.attention.prefill import attend_prefill
from remora.kernels.kv_store import SCALE_DTYPE, store_kv
from remora.kernels.norm import rms_norm
from remora.kernels.rope import apply_rope

# KV bytes that decode rows gather at a time: the copy stays in cache, and the allocator reuses its
# memory. Unbounded, 32 rows of 256 tokens took three times as long in page faults alone.
GATHER_BYTES = 3 * 2**20
NO_DECODES = DecodePlan(())


class TorchAttention:
    """AttentionBackend of torch operations; runs on every device.

    kv_pages:  [num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim]; padding writes to
               page 0, which holds no sequence. Zeroed, because attention multiplies unwritten
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
        """See `PagedKV`."""
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.kv_pages = _zeros(shape, kv_dtype or dtype, device)
        self.scales = None if kv_dtype is None else _zeros(shape[:-1], SCALE_DTYPE, device)
        self._static_scales = None if static_scales is None else static_scales.to(device)
        self.page_size = page_size
        self._slot_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        self._planned_batch: ForwardBatch | None = None
        self._plans: dict[tuple[int | None, bool], DecodePlan] = {}

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store and attend; see `protocols.AttentionBackend`."""
        kv_pages = self.kv_pages[layer]
        scales = None if self.scales is None else self.scales[layer]
        num_heads = heads.shape[1] - 2 * kv_pages.shape[3]
        qk, value = apply_qk_norm_rope(heads, num_heads, rope)
        query = qk[:, :num_heads]
        static = None if self._static_scales is None else self._static_scales[layer]
        store_kv(qk[:, num_heads:], value, kv_pages, batch.slots, scales, static)
        num_decodes = batch.num_decodes
        plan = self._plan(batch, spec) if num_decodes else NO_DECODES
        if num_decodes == len(query):
            return _decode(query, kv_pages, scales, plan, spec)

        out = torch.empty_like(query)
        if num_decodes:
            out[:num_decodes] = _decode(query[:num_decodes], kv_pages, scales, plan, spec)
        for row, (start, stop) in enumerate(pairwise(batch.extend_starts)):
            out[start:stop] = attend_prefill(
                query[start:stop],
                kv_pages,
                batch.tables[num_decodes + row],
                context_len=batch.extend_lens[row],
                scale=spec.scale,
                window=spec.window,
                chunked=spec.chunked,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                slopes=spec.slopes,
                kv_scales=scales,
            )
        return out

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages in all layers."""
        copy_kv_pages(self.kv_pages, self.scales, sources, targets)

    def _plan(self, batch: ForwardBatch, spec: AttentionSpec) -> DecodePlan:
        """Plan the decode rows once per batch and window; layers share the plan."""
        if batch is not self._planned_batch:
            self._planned_batch = batch
            self._plans.clear()
        key = (spec.window, spec.chunked)
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_decode(
                batch.tables[: batch.num_decodes],
                batch.lengths[: batch.num_decodes],
                page_size=self.page_size,
                window=spec.window,
                chunked=spec.chunked,
                max_slots=GATHER_BYTES // self._slot_bytes,
            )
            self._plans[key] = plan
        return plan


def _decode(
    query: Tensor, kv_pages: Tensor, scales: Tensor | None, plan: DecodePlan, spec: AttentionSpec
) -> Tensor:
    return attend_decode(
        query,
        kv_pages,
        plan,
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        sinks=spec.sinks,
        slopes=spec.slopes,
        kv_scales=scales,
    )


def apply_qk_norm_rope(heads: Tensor, num_heads: int, rope: QKNormRope) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normalised and rotated together, and unchanged values.

    heads:  [T, num_heads + 2 * num_kv_heads, head_dim]
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    qk, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if rope.norms is not None:
        query_norm, key_norm = rope.norms
        query = rms_norm(qk[:, :num_heads], query_norm, rope.eps)
        qk = torch.cat((query, rms_norm(qk[:, num_heads:], key_norm, rope.eps)), dim=1)
    return apply_rope(qk, rope.cos, rope.sin, interleaved=rope.interleaved), value


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros that, on a CPU, take no time or memory until they are written.

    torch.zeros writes all of them: seconds for a few GiB. The operating system's pages are zero.
    """
    if device != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
