"""The forward pass of one rank among several, as torch operations.

All ranks make the same calls with the same inputs. Each computes its share of its stage's layers;
hidden states go from stage to stage, the last one's ranks make logits, and rank 0 gathers them.

Legend: T tokens of the step, R rows of logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remora.engine.fallback.model import FallbackModel
from remora.engine.models.decoder import DecoderModel
from remora.engine.parallel.group import Group
from remora.engine.parallel.micro_batches import split_inputs
from remora.engine.protocols import AttentionBackend
from remora.engine.runner.eager import make_batch
from remora.engine.runner.inputs import Int32Array, StepInputs
from remora.kernels.lora import RowGroups


class RankForward:
    """ForwardPass over one rank's share of a model."""

    def __init__(
        self,
        model: DecoderModel | FallbackModel,
        attention: AttentionBackend,
        group: Group,
        *,
        page_size: int,
        device: str = "cpu",
        micro_batches: int = 1,
    ) -> None:
        self._model = model
        self._attention = attention
        self._group = group
        self._layout = group.layout
        self._page_size = page_size
        self._device = torch.device(device)
        self._micro_batches = micro_batches
        self._hidden: Tensor | None = None
        self._adapters: Int32Array = np.empty(0, dtype=np.int32)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size] on rank 0, [0, vocab_size] else."""
        parts = split_inputs(inputs, self._micro_batches)
        made = [self._run_stage(part) for part in parts]
        index = torch.from_numpy(inputs.logit_index).to(self._device)
        wanted: Tensor | None = None
        if self._layout.is_last_stage:
            # The head comes once for all parts: its weight is read once, and no rank waits for
            # another to take logits while that one waits for the next part.
            self._hidden = made[0] if len(made) == 1 else torch.cat(made)
            wanted = self._hidden[index]
        self._adapters = inputs.adapters
        return self._gather_logits(wanted, inputs.adapters[inputs.logit_index])

    @torch.inference_mode()
    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits of tokens of the latest step.

        [last - first, vocab_size] on rank 0, [0, vocab_size] elsewhere.
        """
        wanted: Tensor | None = None
        if self._layout.is_last_stage:
            assert self._hidden is not None, "no step has run"
            wanted = self._hidden[first:last]
        return self._gather_logits(wanted, self._adapters[first:last])

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        return self._hidden[first:last]

    def close(self) -> None:
        """Nothing was started; the group belongs to who made it."""

    def _run_stage(self, inputs: StepInputs) -> Tensor:
        """Take a part of the step from the stage before and hand it on; return what was made."""
        layout, group, model = self._layout, self._group, self._model
        batch = make_batch(inputs, page_size=self._page_size, device=self._device)
        stream: Tensor | None = None
        if not layout.is_first_stage:
            shape = (inputs.num_tokens, model.config.hidden_size)
            stream = torch.empty(shape, dtype=model.dtype, device=self._device)
            group.receive(stream, layout.rank - layout.tp_size)
        made = model.forward(batch, self._attention, group=group, stream=stream)
        if not layout.is_last_stage:
            group.send(made, layout.rank + layout.tp_size)
        return made

    def _gather_logits(self, hidden: Tensor | None, adapters: Int32Array) -> Tensor:
        """Make logits of hidden states [R, hidden_size] and bring them to rank 0.

        hidden:    None on ranks that make none
        adapters:  [R] slot of each row's adapter
        """
        vocab_size, layout, num_rows = self._model.vocab_size, self._layout, len(adapters)
        own: Tensor | None = None
        if hidden is not None and num_rows > 0:
            own = self._model.logits(hidden, RowGroups.of(adapters, self._device))
        if layout.rank != 0 or num_rows == 0:
            if own is not None:
                self._group.send(own, 0)
            return torch.empty((0, vocab_size), device=self._device)
        logits = torch.empty((num_rows, vocab_size), device=self._device)
        for rank in layout.last_stage:
            held = layout.at(rank).share(vocab_size)
            part = logits[:, held.start : held.stop]
            if rank != 0:
                self._group.receive(part, rank)
            elif own is not None:
                part.copy_(own)
        return logits
