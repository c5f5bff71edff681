"""The forward pass as torch operations, one by one: the reference, which runs on every device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remora.engine.batch import ForwardBatch
from remora.engine.inputs import Int32Array, Int64Array, StepInputs
from remora.engine.kv.pages import pages_needed
from remora.engine.protocols import AttentionBackend, Model
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

    def close(self) -> None:
        """Nothing was started."""


def make_batch(inputs: StepInputs, *, page_size: int, device: torch.device) -> ForwardBatch:
    """Bring a step's inputs to the device."""

    def tensor(values: Int64Array) -> Tensor:
        return torch.from_numpy(values).to(device)

    def table(pages: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
        return tensor(pages.astype(np.int64))

    lengths = inputs.lengths
    num_decodes = inputs.num_decodes
    decode_rows, extend_rows = inputs.rows[:num_decodes], inputs.rows[num_decodes:]
    widest = pages_needed(int(lengths[:num_decodes].max(initial=1)), page_size)
    extend_lens = lengths[num_decodes:].tolist()
    return ForwardBatch(
        token_ids=tensor(inputs.token_ids),
        positions=tensor(inputs.positions),
        slots=tensor(inputs.slots),
        num_decodes=num_decodes,
        decode_tables=table(inputs.tables[decode_rows, :widest]),
        decode_lens=tensor(lengths[:num_decodes]),
        extend_starts=tuple(inputs.starts[num_decodes:].tolist()),
        extend_lens=tuple(extend_lens),
        extend_tables=tuple(
            table(inputs.tables[row, : pages_needed(length, page_size)])
            for row, length in zip(extend_rows, extend_lens, strict=True)
        ),
        logit_index=tensor(inputs.logit_index),
        adapters=RowGroups.of(inputs.adapters, device),
    )
