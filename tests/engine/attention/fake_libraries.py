"""Attention packages that are not installed here: their public signatures, over torch's reference.

Each function takes the parameters of the package's, checks what its documentation demands of them,
and computes the result from what it was given: pages, tables and lengths, nothing else.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from remora.kernels.attention.prefill import attend_prefill

INT32 = torch.int32


def attend_rows(
    queries: list[Tensor],
    key: Tensor,
    value: Tensor,
    pages: list[Tensor],
    lengths: list[int],
    *,
    scale: float,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> list[Tensor]:
    """Attend the last tokens of each row; `pages` are the page ids of each."""
    kv_pages = torch.stack((key, value))
    return [
        attend_prefill(
            query,
            kv_pages,
            ids,
            context_len=length,
            scale=scale,
            window=None if window_left < 0 else window_left + 1,
            chunked=False,
            soft_cap=soft_cap or None,
            sinks=sinks,
            slopes=slopes,
        )
        for query, ids, length in zip(queries, pages, lengths, strict=True)
    ]


def _check_pages(key: Tensor, value: Tensor, table: Tensor, lengths: Tensor) -> None:
    assert key.shape == value.shape
    assert key.dim() == 4
    assert key.stride(-1) == value.stride(-1) == 1
    assert table.dtype == lengths.dtype == INT32
    assert table.shape[0] == len(lengths)
    assert table.stride(-1) == lengths.stride(0) == 1
    assert int(lengths.max()) <= table.shape[1] * key.shape[1]


def _split(query: Tensor, starts: Tensor, longest: int) -> list[Tensor]:
    assert query.dim() == 3
    assert starts.dtype == INT32
    assert starts[0] == 0
    assert starts[-1] == len(query)
    parts = [query[start:stop] for start, stop in pairwise(starts.tolist())]
    assert max(len(part) for part in parts) == longest
    return parts


class FlashAttn2:
    """The package flash_attn, 2.8."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Any = None,
        v: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert k is v is rotary_cos is cache_batch_idx is cache_leftpad is None
        assert causal
        assert q.dim() == 4
        assert k_cache.shape[1] % 256 == 0
        assert window_size[1] in (-1, 0)
        assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
        _check_pages(k_cache, v_cache, block_table, cache_seqlens)
        made = attend_rows(
            list(q),
            k_cache,
            v_cache,
            list(block_table),
            cache_seqlens.tolist(),
            scale=softmax_scale,
            window_left=window_size[0],
            soft_cap=softcap,
            slopes=alibi_slopes,
        )
        return torch.stack(made)

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Tensor:
        assert causal
        assert k.shape[1] % 256 == 0
        assert cu_seqlens_k.dtype == INT32
        assert cu_seqlens_k[0] == 0
        assert cu_seqlens_k.shape == cu_seqlens_q.shape
        lengths = cu_seqlens_k.diff()
        assert int(lengths.max()) <= max_seqlen_k
        _check_pages(k, v, block_table, lengths)
        made = attend_rows(
            _split(q, cu_seqlens_q, max_seqlen_q),
            k,
            v,
            list(block_table),
            lengths.tolist(),
            scale=softmax_scale,
            window_left=window_size[0],
            soft_cap=softcap,
            slopes=alibi_slopes,
        )
        return torch.cat(made)


class FlashAttn3:
    """The package flash_attn_interface, 3.0."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Any = None,
        v: Any = None,
        qv: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        page_table: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k_new: Any = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Any = None,
        num_splits: int = 0,
        pack_gqa: Any = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert k is v is qv is scheduler_metadata is None
        assert causal
        _check_pages(k_cache, v_cache, page_table, cache_seqlens)
        if cu_seqlens_q is None:
            assert q.dim() == 4
            queries = list(q)
        else:
            assert max_seqlen_q is not None
            queries = _split(q, cu_seqlens_q, max_seqlen_q)
        made = attend_rows(
            queries,
            k_cache,
            v_cache,
            list(page_table),
            cache_seqlens.tolist(),
            scale=softmax_scale,
            window_left=window_size[0],
            soft_cap=softcap,
        )
        return torch.stack(made) if cu_seqlens_q is None else torch.cat(made)


class FlashAttn4:
    """The package flash_attn.cute, 4.0.0b36."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        gather_kv_indices: Any = None,
        page_table: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Any = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[Tensor, None]:
        assert qv is cu_seqlens_k is seqused_q is None
        assert causal
        assert num_splits <= 1, "some GPUs do not split"
        assert max_seqlen_q is not None
        assert max_seqlen_k is not None
        _check_pages(k, v, page_table, seqused_k)
        assert int(seqused_k.max()) <= max_seqlen_k
        if learnable_sink is not None:
            assert learnable_sink.shape == (q.shape[1],)
            assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
        left = window_size[0]
        made = attend_rows(
            _split(q, cu_seqlens_q, max_seqlen_q),
            k,
            v,
            list(page_table),
            seqused_k.tolist(),
            scale=softmax_scale,
            window_left=-1 if left is None else left,
            soft_cap=softcap,
            sinks=learnable_sink,
        )
        return torch.cat(made), None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.13, which needs a GPU."""
    assert cu_seq_k is None
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert window_size[1] == 0
    assert scale is not None
    assert seqused_k is not None
    assert block_table is not None
    assert key.shape[1] % 256 == 0
    _check_pages(key, value, block_table, seqused_k)
    assert int(seqused_k.max()) <= max_k
    made = attend_rows(
        _split(query, cu_seq_q, max_q),
        key,
        value,
        list(block_table),
        seqused_k.tolist(),
        scale=scale,
        window_left=window_size[0],
    )
    return torch.cat(made)


class FlashInfer:
    """The package flashinfer, 0.7.

    is_captured:  whether steps run from a graph, so that nothing may be planned
    num_plans:    of all wrappers so far
    """

    def __init__(self) -> None:
        self.is_captured = False
        self.num_plans = 0

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> _DecodeWrapper:
        return _DecodeWrapper(self, *args, **options)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> _PrefillWrapper:
        return _PrefillWrapper(self, *args, **options)


class _Wrapper:
    """What both wrappers do with pages."""

    def __init__(self, library: FlashInfer, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.library = library
        self.is_planned = False

    def note_plan(self, *on_host: Tensor) -> None:
        assert not self.library.is_captured, "a graph cannot plan"
        assert all(each.device.type == "cpu" and each.dtype == INT32 for each in on_host)
        self.library.num_plans += 1
        self.is_planned = True

    def hold(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
        assert indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert bool((indptr.diff() > 0).all())
        assert len(indptr) == len(last_page_len) + 1
        assert indices.dtype == INT32
        assert 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        self.indptr, self.indices, self.last_lens = indptr, indices, last_page_len
        self.page_size = page_size

    def attend(
        self, queries: list[Tensor], pages: tuple[Tensor, Tensor], out: Tensor, **options: Any
    ) -> None:
        assert self.is_planned
        key, value = pages
        assert key.shape[1] == self.page_size
        bounds = self.indptr.tolist()
        ids = [self.indices[start:stop] for start, stop in pairwise(bounds)]
        lengths = [
            (len(each) - 1) * self.page_size + last
            for each, last in zip(ids, self.last_lens.tolist(), strict=True)
        ]
        out.copy_(torch.cat(attend_rows(queries, key, value, ids, lengths, **options)))


class _DecodeWrapper(_Wrapper):
    def __init__(
        self,
        library: FlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(library, float_workspace_buffer, kv_layout)
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        self.note_plan(indptr, last_page_len)
        self.hold(indptr, indices, last_page_len, page_size)
        if self.buffers is not None:  # the memory that a graph reads
            assert len(last_page_len) == len(self.buffers[2]), "a graph has one number of rows"
            self.buffers[0].copy_(indptr)
            self.buffers[1][: len(indices)].copy_(indices)
            self.buffers[2].copy_(last_page_len)
            self.indptr, self.indices, self.last_lens = self.buffers
        self.planned = (num_qo_heads, num_kv_heads, head_dim), q_data_type, kv_data_type
        assert sm_scale is not None
        self.options = {
            "scale": sm_scale,
            "window_left": window_left,
            "soft_cap": logits_soft_cap or 0.0,
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        key = paged_kv_cache[0]
        assert self.planned == ((q.shape[1], key.shape[2], q.shape[2]), q.dtype, key.dtype)
        assert len(q) == len(self.last_lens)
        self.attend(list(q[:, None]), paged_kv_cache, out, **self.options)
        return out


class _PrefillWrapper(_Wrapper):
    def __init__(
        self,
        library: FlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
    ) -> None:
        assert not use_cuda_graph
        super().__init__(library, float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal
        self.note_plan(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        self.hold(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.starts = qo_indptr
        self.planned = (num_qo_heads, num_kv_heads, head_dim_qk), q_data_type, kv_data_type
        assert sm_scale is not None
        self.options = {
            "scale": sm_scale,
            "window_left": window_left,
            "soft_cap": logits_soft_cap or 0.0,
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        key = paged_kv_cache[0]
        assert self.planned == ((q.shape[1], key.shape[2], q.shape[2]), q.dtype, key.dtype)
        longest = int(self.starts.diff().max())
        self.attend(_split(q, self.starts, longest), paged_kv_cache, out, **self.options)
        return out
