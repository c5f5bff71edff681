"""The forward pass as torch operations, one by one: the reference, which runs on every device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from remora.engine.kv.pages import pages_needed
from remora.engine.protocols import AttentionBackend, Model
from remora.engine.runner.batch import ForwardBatch
from remora.engine.runner.inputs import Int32Array, Int64Array, StepInputs
from remora.kernels.lora import RowGroups


class EagerForward:
    """ForwardPass over a torch model and an attention backend."""

    def __init__(
        self, model: Model, attention: AttentionBackend, *, page_size: int, device: str = "cpu"
    ) -> None:
        self._model = model
        self._attention = attention
        self._page_size = page_size
        self._device = torch.device(device)
        self._hidden: Tensor | None = None
        self._adapters: Int32Array = np.empty(0, dtype=np.int32)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size]."""
        batch = make_batch(inputs, page_size=self._page_size, device=self._device)
        self._hidden = self._model.forward(batch, self._attention)
        self._adapters = inputs.adapters
        wanted = RowGroups.of(inputs.adapters[inputs.logit_index], self._device)
        return self._model.logits(self._hidden[batch.logit_index], wanted)

    @torch.inference_mode()
    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        wanted = RowGroups.of(self._adapters[first:last], self._device)
        return self._model.logits(self._hidden[first:last], wanted)

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        return self._hidden[first:last]

    def close(self) -> None:
        """Nothing was started."""


def make_batch(inputs: StepInputs, *, page_size: int, device: torch.device) -> ForwardBatch:
    """Bring a step's inputs to the device."""

    def tensor(values: Int64Array) -> Tensor:
        return torch.from_numpy(values).to(device)

    def narrow(values: Int64Array) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    widest = pages_needed(int(inputs.lengths.max(initial=1)), page_size)
    batch = ForwardBatch(
        token_ids=tensor(inputs.token_ids),
        positions=tensor(inputs.positions),
        slots=tensor(inputs.slots),
        num_decodes=inputs.num_decodes,
        tables=torch.from_numpy(inputs.tables[inputs.rows, :widest]).to(device),
        starts=narrow(inputs.starts),
        lengths=narrow(inputs.lengths),
        extend_starts=tuple(inputs.starts[inputs.num_decodes :].tolist()),
        extend_lens=tuple(inputs.lengths[inputs.num_decodes :].tolist()),
        logit_index=tensor(inputs.logit_index),
        adapters=RowGroups.of(inputs.adapters, device),
    )
    apart = inputs.windows
    if apart is None:
        return batch
    tables = torch.from_numpy(apart.tables[inputs.rows, :widest]).to(device)
    return replace(batch, windowed=replace(batch, slots=tensor(apart.slots), tables=tables))
