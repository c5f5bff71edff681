"""What one forward pass runs on: device tensors, laid out flat.

Legend: T tokens of the step, D decode rows (one token each), E extend rows, R rows of logits,
P pages of the longest table. Tokens of the D decode rows come first, then the extend rows' tokens,
row after row. Knows nothing of requests or of how rows were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remora.kernels.lora import NO_GROUPS, RowGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs.

    token_ids:      [T] int64
    positions:      [T] int64, counted from the start of each sequence
    slots:          [T] int64, where each token's K and V go: page_id * page_size + offset
    num_decodes:    D
    decode_tables:  [D, P] int64; entries past a row's last page are the dump page 0
    decode_lens:    [D] int64, tokens of context, the query's own included
    extend_starts:  E + 1 ints, half-open ranges of the extend rows' tokens within [D, T)
    extend_lens:    E ints, tokens of context at the end of the chunk, the chunk included
    extend_tables:  E tensors [pages of that row] int64
    logit_index:    [R] int64, tokens of this batch whose logits are wanted
    adapters:       which of the T tokens belong to which adapter
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    num_decodes: int
    decode_tables: Tensor
    decode_lens: Tensor
    extend_starts: tuple[int, ...]
    extend_lens: tuple[int, ...]
    extend_tables: tuple[Tensor, ...]
    logit_index: Tensor
    adapters: RowGroups = NO_GROUPS
