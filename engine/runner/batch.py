"""The inputs of one forward pass, as flat tensors on the device.

Legend: T tokens of the step, row by row; S rows, of which the first D decode (one token each) and E
extend; R rows of logits; P pages of the longest table. Knows nothing of requests or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remora.engine.embeddings import EmbeddedTokens
from remora.kernels.lora import NO_GROUPS, RowGroups
from remora.kernels.memory import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormRope:
    """QK norm, if any, and RoPE, applied to Q and K heads before attention.

    cos, sin:     [T, pairs] in the dtype of the heads, as in `kernels/rope.py`
    interleaved:  which elements form a pair, as in `kernels/rope.py`
    norms:        weights [head_dim] of the norms of each query and each key head; None = no norms
    eps:          of the norms
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """Scores and mask of a layer's attention.

    scale:     factor on q.k before softmax
    window:    a query sees the last `window` positions, its own included; None = all
    both_ways: a query also sees as many later positions; without KV cache only
    chunked:   a query sees no position before the last multiple of `window`
    soft_cap:  c: scores s become c * tanh(s / c), right after the scale; None = unchanged
    sinks:     [num_heads] float32, one extra score per head in the softmax, without a value; None =
               no sinks
    slopes:    [num_heads] float32, decrease of each head's scores per position of distance (ALiBi);
               None = no ALiBi
    """

    scale: float
    window: int | None = None
    both_ways: bool = False
    chunked: bool = False
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GivenRows:
    """`EmbeddedTokens` on the device: places [E] int64, rows [E, hidden_size] float32."""

    places: Tensor
    rows: Tensor

    @staticmethod
    def of(embedded: EmbeddedTokens | None, device: torch.device) -> GivenRows | None:
        """Bring given embeddings to the device."""
        if embedded is None:
            return None
        return GivenRows(to_device(embedded.places, device), to_device(embedded.rows, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs.

    token_ids:      [T] int64
    positions:      [T] int64, counted from the start of each sequence
    slots:          [T] int64, of each token's K and V: page_id * page_size + offset
    num_decodes:    D
    tables:         [S, P] int32; entries past a row's last page are the dump page 0
    starts:         [S + 1] int32, each row's first token, then T
    lengths:        [S] int32, tokens of context, this step's included
    extend_starts:  E + 1 ints: `starts` of the extend rows, then T, on the host
    extend_lens:    E ints: `lengths` of the extend rows, on the host
    logit_index:    [R] int64, tokens of this batch that need logits
    adapters:       tokens grouped by adapter
    is_padded:      whether tokens in slot 0 are padding, whose results nothing reads
    windowed:       the batch with `slots` and `tables` of window layers, if these have a page pool
                    of their own
    embedded:       tokens whose embeddings are given, which have no ids; None = there are none
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    num_decodes: int
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    extend_starts: tuple[int, ...]
    extend_lens: tuple[int, ...]
    logit_index: Tensor
    adapters: RowGroups = NO_GROUPS
    is_padded: bool = False
    windowed: ForwardBatch | None = None
    embedded: GivenRows | None = None
