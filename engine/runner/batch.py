"""What one forward pass runs on: device tensors, laid out flat.

Legend: T tokens of the step, S rows, of which the first D decode (one token each) and E extend, R
rows of logits, P pages of the longest table. Tokens come row after row. Knows nothing of requests
or of how rows were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remora.kernels.lora import NO_GROUPS, RowGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormRope:
    """What happens to heads of queries and keys before they attend: perhaps a norm, then rotation.

    cos, sin:     [T, pairs] in the dtype of the heads, as in `kernels/rope.py`
    interleaved:  which elements are pairs, as there
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
    """How a layer's queries look at keys.

    scale:     factor on q.k before softmax
    window:    a query sees the last `window` positions, its own included; None = all
    both_ways: it sees positions that come later too, and of these as many; without KV cache only
    chunked:   of these only those since the last multiple of `window`
    soft_cap:  c, if scores s are to be c * tanh(s / c); after the scale, before anything else
    sinks:     [num_heads] float32, a score of each head beside those of its keys, which takes part
               in softmax and brings no value; None = there is none
    slopes:    [num_heads] float32, what each head's scores fall by with every position that a key
               is away; None = they do not
    """

    scale: float
    window: int | None = None
    both_ways: bool = False
    chunked: bool = False
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs.

    token_ids:      [T] int64
    positions:      [T] int64, counted from the start of each sequence
    slots:          [T] int64, where each token's K and V go: page_id * page_size + offset
    num_decodes:    D
    tables:         [S, P] int32; entries past a row's last page are the dump page 0
    starts:         [S + 1] int32, each row's first token, then T
    lengths:        [S] int32, tokens of context at the end of the step, its own included
    extend_starts:  E + 1 ints: `starts` of the extend rows, then T, on the host
    extend_lens:    E ints: `lengths` of the extend rows, on the host
    logit_index:    [R] int64, tokens of this batch whose logits are wanted
    adapters:       which of the T tokens belong to which adapter
    windowed:       the batch with `slots` and `tables` of layers with a window, where these have
                    pages of their own
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
    windowed: ForwardBatch | None = None
