"""Attention by FlashAttention 2, 3 and 4, and by torch's own build of it.

The packages differ in their calls and agree on the rest: page tables and lengths are read on the
device, so that graphs can capture decode steps. Each call below is one package's public interface.

Legend: S rows, T queries of all rows, H query heads, W pages of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from remora.engine.attention.paged_kv import PagedKV
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope

Function = Callable[..., Any]


class PagedCall(Protocol):
    """Attention of rows over their pages, by one package."""

    def __call__(
        self,
        query: Tensor,
        kv_pages: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        spec: AttentionSpec,
        *,
        longest: int,
    ) -> Tensor:
        """Attend the last queries of each row; returns [T, H, head_dim].

        query:     [T, H, head_dim]
        kv_pages:  [2, num_pages + 1, page_size, num_kv_heads, head_dim]
        tables:    [S, W] int32
        starts:    [S + 1] int32, each row's first query, then T
        lengths:   [S] int32
        longest:   most queries of a row; 1 = every row has one
        """


class FlashAttention(PagedKV):
    """AttentionBackend over a package's call: one for decode rows, and one for the others."""

    def __init__(self, call: PagedCall, **pages: Any) -> None:
        super().__init__(**pages)
        self._call = call
        self._batch: ForwardBatch | None = None
        self._starts: Tensor | None = None

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store and attend; see `protocols.AttentionBackend`."""
        query, kv_pages = self.store(layer, heads, rope, batch), self.kv_pages[layer]
        rows, tables, lengths = batch.num_decodes, batch.tables, batch.lengths
        if rows == len(query):
            return self._call(query, kv_pages, tables, batch.starts, lengths, spec, longest=1)
        out = torch.empty_like(query)
        if rows > 0:
            decodes = tables[:rows], batch.starts[: rows + 1], lengths[:rows]
            out[:rows] = self._call(query[:rows], kv_pages, *decodes, spec, longest=1)
        extends = tables[rows:], self._extend_starts(batch), lengths[rows:]
        longest = max(stop - start for start, stop in pairwise(batch.extend_starts))
        out[rows:] = self._call(query[rows:], kv_pages, *extends, spec, longest=longest)
        return out

    def _extend_starts(self, batch: ForwardBatch) -> Tensor:
        """Return the first queries of the extend rows, counted from the first of them all."""
        if self._starts is None or batch is not self._batch:
            self._batch = batch
            self._starts = batch.starts[batch.num_decodes :] - batch.num_decodes
        return self._starts


class FlashAttention2:
    """PagedCall of the package flash_attn, from 2.6 on; pages are multiples of 256 tokens."""

    def __init__(self, with_kv_cache: Function, varlen: Function) -> None:
        self._with_kv_cache = with_kv_cache
        self._varlen = varlen

    def __call__(
        self,
        query: Tensor,
        kv_pages: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        spec: AttentionSpec,
        *,
        longest: int,
    ) -> Tensor:
        """Attend; see `PagedCall`."""
        options = {
            "block_table": tables,
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": _window(spec),
            "softcap": spec.soft_cap or 0.0,
            "alibi_slopes": spec.slopes,
        }
        key, value = kv_pages
        out: Tensor
        if longest == 1:  # splits the keys of few rows, which the other function does not
            query = query.unsqueeze(1)
            out = self._with_kv_cache(query, key, value, cache_seqlens=lengths, **options)
            return out.squeeze(1)
        out = self._varlen(
            query,
            key,
            value,
            cu_seqlens_q=starts,
            cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=longest,
            max_seqlen_k=tables.shape[1] * key.shape[1],
            **options,
        )
        return out


class FlashAttention3:
    """PagedCall of FlashAttention 3, the package flash_attn_interface."""

    def __init__(self, with_kv_cache: Function) -> None:
        self._with_kv_cache = with_kv_cache

    def __call__(
        self,
        query: Tensor,
        kv_pages: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        spec: AttentionSpec,
        *,
        longest: int,
    ) -> Tensor:
        """Attend; see `PagedCall`."""
        is_decode = longest == 1
        rows = {} if is_decode else {"cu_seqlens_q": starts, "max_seqlen_q": longest}
        out: Tensor = self._with_kv_cache(
            query.unsqueeze(1) if is_decode else query,
            kv_pages[0],
            kv_pages[1],
            cache_seqlens=lengths,
            page_table=tables,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
            softcap=spec.soft_cap or 0.0,
            **rows,
        )
        return out.squeeze(1) if is_decode else out


class FlashAttention4:
    """PagedCall of FlashAttention 4, the package flash_attn.cute.

    splits:  whether the keys of few rows may be split, which it does on Blackwell only
    """

    def __init__(self, varlen: Function, *, splits: bool) -> None:
        self._varlen = varlen
        self._num_splits = 0 if splits else 1  # 0 = the package decides

    def __call__(
        self,
        query: Tensor,
        kv_pages: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        spec: AttentionSpec,
        *,
        longest: int,
    ) -> Tensor:
        """Attend; see `PagedCall`."""
        made = self._varlen(
            query,
            kv_pages[0],
            kv_pages[1],
            cu_seqlens_q=starts,
            seqused_k=lengths,
            max_seqlen_q=longest,
            max_seqlen_k=tables.shape[1] * kv_pages.shape[2],
            page_table=tables,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(None, None) if spec.window is None else (spec.window - 1, 0),
            learnable_sink=spec.sinks,
            softcap=spec.soft_cap or 0.0,
            num_splits=self._num_splits,
        )
        out: Tensor = made[0] if isinstance(made, tuple) else made  # with log-sum-exp or without
        return out


class TorchVarlen:
    """PagedCall of torch.nn.attention.varlen; pages are multiples of 256 tokens."""

    def __init__(self, varlen: Function) -> None:
        self._varlen = varlen

    def __call__(
        self,
        query: Tensor,
        kv_pages: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        spec: AttentionSpec,
        *,
        longest: int,
    ) -> Tensor:
        """Attend; see `PagedCall`."""
        out: Tensor = self._varlen(
            query,
            kv_pages[0],
            kv_pages[1],
            starts,
            None,  # starts of keys, which are in pages
            longest,
            tables.shape[1] * kv_pages.shape[2],
            scale=spec.scale,
            window_size=(_window(spec)[0], 0),
            enable_gqa=True,
            seqused_k=lengths,
            block_table=tables,
        )
        return out


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees; -1 = all."""
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)
