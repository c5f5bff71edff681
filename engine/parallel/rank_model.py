"""A rank's share of a model as a whole `Model`: it exchanges with the other ranks on the device.

Sums, hidden states between stages and parts of logits travel in stream order, so a forward pass
that knows no ranks can run it, and a graph can capture it with the exchanges. All ranks make the
same calls with batches of the same rows.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from remora.engine.fallback.model import FallbackModel
from remora.engine.models.decoder import DecoderModel
from remora.engine.parallel.group import Group
from remora.engine.parallel.micro_batches import split_batch
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.batch import ForwardBatch
from remora.kernels.lora import NO_GROUPS, RowGroups


class RankModel:
    """`Model` of several ranks. Only rank 0 gets logits, and only the last stage final states.

    micro_batches:  parts of a step, on which pipeline stages work at the same time
    """

    def __init__(
        self, model: DecoderModel | FallbackModel, group: Group, *, micro_batches: int = 1
    ) -> None:
        self.vocab_size = model.vocab_size
        self._model = model
        self._group = group
        self._micro_batches = micro_batches if group.layout.pp_size > 1 else 1

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Run this rank's layers; returns the hidden states [T, hidden_size] after them."""
        parts = split_batch(batch, self._micro_batches)
        made = [self._run_stage(part, attention) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Return float32 logits [R, vocab_size] of hidden states on rank 0, [0, vocab_size] else.

        hidden:  [R, hidden_size] of this rank; the last stage's count
        """
        own = None
        if self._group.layout.is_last_stage and len(hidden) > 0:
            own = self._model.logits(hidden, adapters)
        return gather_logits(self._group, own, len(hidden), self.vocab_size, hidden.device)

    def _run_stage(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        layout, group = self._group.layout, self._group
        model = cast("DecoderModel", self._model)  # or FallbackModel, which has the same methods
        stream: Tensor | None = None
        if not layout.is_first_stage:
            shape = (len(batch.token_ids), model.config.hidden_size)
            stream = torch.empty(shape, dtype=model.dtype, device=batch.token_ids.device)
            group.receive(stream, layout.rank - layout.tp_size)
        made = model.forward(batch, attention, group=group, stream=stream)
        if not layout.is_last_stage:
            group.send(made, layout.rank + layout.tp_size)
        return made


def gather_logits(
    group: Group, own: Tensor | None, num_rows: int, vocab_size: int, device: torch.device
) -> Tensor:
    """Gather the parts of logits on rank 0: [num_rows, vocab_size] there, [0, vocab_size] else.

    own:  this rank's part, [num_rows, its share of the vocabulary]; None = it has none
    """
    layout = group.layout
    if layout.rank != 0 or num_rows == 0:
        if own is not None and layout.rank != 0:
            group.send(own, 0)
        return torch.empty((0, vocab_size), device=device)
    logits = torch.empty((num_rows, vocab_size), device=device)
    for rank in layout.last_stage:
        held = layout.at(rank).share(vocab_size)
        part = logits[:, held.start : held.stop]
        if rank != 0:
            group.receive(part, rank)
        elif own is not None:
            part.copy_(own)
    return logits
