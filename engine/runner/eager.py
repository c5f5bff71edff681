"""The forward pass as torch operations, one by one: the reference, which runs on every device.

Several ranks make the same calls with the same inputs. Each computes its share of its stage's
layers; hidden states go from stage to stage, the last stage's ranks make logits, and rank 0 gathers
them.

Legend: T tokens of the step, R rows of logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from remora.engine.attention.page_copies import copy_step_pages
from remora.engine.attention.page_memory import page_memory
from remora.engine.kv.pages import pages_needed
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.micro_batches import split_inputs
from remora.engine.parallel.rank_model import gather_logits
from remora.engine.protocols import AttentionBackend, Model
from remora.engine.runner.batch import ForwardBatch, GivenRows
from remora.engine.runner.inputs import Int32Array, Int64Array, StepInputs
from remora.kernels.lora import RowGroups
from remora.kernels.memory import to_device

if TYPE_CHECKING:
    from remora.engine.models.decoder import DecoderModel


class EagerForward:
    """ForwardPass over a torch model, or one rank's share of it, and an attention backend.

    group:          of the rank, which the pass uses and does not close
    micro_batches:  parts of a step, on which pipeline stages work at the same time
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        *,
        page_size: int,
        device: str = "cpu",
        group: Group = ALONE,
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
        copy_step_pages(self._attention, inputs.copies, self._device)
        parts = split_inputs(inputs, self._micro_batches)
        made = [self._run_stage(part) for part in parts]
        if self._layout.is_last_stage:
            # All parts share one head: its weight is read once, and no rank waits for another to
            # take logits while that one waits for the next part.
            self._hidden = made[0] if len(made) == 1 else torch.cat(made)
        self._adapters = inputs.adapters
        index = to_device(inputs.logit_index, self._device)
        return self._project(index, inputs.adapters[inputs.logit_index])

    @torch.inference_mode()
    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits of tokens of the latest step.

        [last - first, vocab_size] on rank 0, [0, vocab_size] elsewhere.
        """
        return self._project(slice(first, last), self._adapters[first:last])

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        return self._hidden[first:last]

    def rejoin(self, group: Group) -> None:
        """Use another group of the same layout from now on; the memory for KV stays."""
        self._group = group

    def page_memory(self) -> list[Tensor]:
        """Return the memory of K and V."""
        return list(page_memory(self._attention))

    def close(self) -> None:
        """Do nothing: no thread runs, and the group has its own owner."""

    def _run_stage(self, inputs: StepInputs) -> Tensor:
        """Run this rank's layers on a part of the step; returns their output.

        Receives the part from the stage before, and sends the output to the next.
        """
        layout, group = self._layout, self._group
        batch = make_batch(inputs, page_size=self._page_size, device=self._device)
        if layout.num_ranks == 1:
            return self._model.forward(batch, self._attention)
        model = cast("DecoderModel", self._model)  # or FallbackModel, which has the same methods
        stream: Tensor | None = None
        if not layout.is_first_stage:
            shape = (inputs.num_tokens, model.config.hidden_size)
            stream = torch.empty(shape, dtype=model.dtype, device=self._device)
            group.receive(stream, layout.rank - layout.tp_size)
        made = model.forward(batch, self._attention, group=group, stream=stream)
        if not layout.is_last_stage:
            group.send(made, layout.rank + layout.tp_size)
        return made

    def _project(self, index: Tensor | slice, adapters: Int32Array) -> Tensor:
        """Project tokens of the latest step to logits and gather these on rank 0.

        index:     [R] of the tokens
        adapters:  [R] slot of each row's adapter
        """
        vocab_size, layout, num_rows = self._model.vocab_size, self._layout, len(adapters)
        own: Tensor | None = None
        if layout.num_ranks == 1 or (layout.is_last_stage and num_rows > 0):
            assert self._hidden is not None, "no step has run"
            groups = RowGroups.of(adapters, self._device)
            own = self._model.logits(self._hidden[index], groups)
            if layout.num_ranks == 1:
                return own
        return gather_logits(self._group, own, num_rows, vocab_size, self._device)


def make_batch(inputs: StepInputs, *, page_size: int, device: torch.device) -> ForwardBatch:
    """Bring a step's inputs to the device."""

    def tensor(values: Int64Array) -> Tensor:
        return to_device(values, device)

    def narrow(values: Int64Array) -> Tensor:
        return to_device(values.astype(np.int32), device)

    widest = pages_needed(int(inputs.lengths.max(initial=1)), page_size)
    batch = ForwardBatch(
        token_ids=tensor(inputs.token_ids),
        positions=tensor(inputs.positions),
        slots=tensor(inputs.slots),
        num_decodes=inputs.num_decodes,
        tables=to_device(inputs.tables[inputs.rows, :widest], device),
        starts=narrow(inputs.starts),
        lengths=narrow(inputs.lengths),
        extend_starts=tuple(inputs.starts[inputs.num_decodes :].tolist()),
        extend_lens=tuple(inputs.lengths[inputs.num_decodes :].tolist()),
        logit_index=tensor(inputs.logit_index),
        adapters=RowGroups.of(inputs.adapters, device),
        embedded=GivenRows.of(inputs.embedded, device),
    )
    windows = inputs.windows
    if windows is None:
        return batch
    tables = to_device(windows.tables[inputs.rows, :widest], device)
    return replace(batch, windowed=replace(batch, slots=tensor(windows.slots), tables=tables))
