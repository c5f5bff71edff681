"""A pooling model: hidden states of whole rows of tokens, then a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remora.engine.encoders.model import EncoderModel
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.parallel.shard import Shard
from remora.engine.pooling.attention import RowsAttention
from remora.engine.pooling.heads import Head
from remora.engine.pooling.row import Row
from remora.engine.pooling.rows import RowBatch, make_rows
from remora.engine.runner.batch import ForwardBatch
from remora.engine.types import FloatArray


class DecoderStates:
    """A decoder without its LM head, which computes whole rows without a KV cache."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self.model = DecoderModel(config, dtype=dtype, device=device)

    def forward(self, rows: RowBatch) -> Tensor:
        """Return the final hidden states [T, hidden_size]."""
        starts = torch.tensor([*rows.starts, sum(rows.lengths)], dtype=torch.int32)
        lengths = torch.tensor(rows.lengths, dtype=torch.int32)
        empty = rows.token_ids.new_zeros(0)
        batch = ForwardBatch(
            token_ids=rows.token_ids,
            positions=rows.positions,
            slots=empty,
            num_decodes=0,
            tables=empty.view(0, 0).int(),
            starts=starts.to(rows.token_ids.device),
            lengths=lengths.to(rows.token_ids.device),
            extend_starts=tuple(starts.tolist()),
            extend_lens=rows.lengths,
            logit_index=empty,
        )
        return self.model.forward(batch, RowsAttention(rows, num_heads=self.config.num_heads))

    def tensors(self) -> dict[str, Shard]:
        """Return checkpoint names and the memory that they fill."""
        return self.model.tensors()

    def pack(self) -> None:
        """Pack the linears of all layers into the layout of the fastest kernels."""
        for block in self.model.blocks:
            for _, linear in block.linears(""):
                linear.pack()


States = EncoderModel | DecoderStates


class PoolingModel:
    """Hidden states and a head. Thread-safe.

    step_id:  token whose states are scored separately; None = each row is pooled
    """

    def __init__(
        self, states: States, head: Head, *, device: str, step_id: int | None = None
    ) -> None:
        self._states = states
        self._head = head
        self._device = device
        self._step_id = step_id

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> FloatArray | list[FloatArray]:
        """Return the outputs of the rows [num_rows, size], in float32.

        With a `step_id`: a list of [num_steps, size], one array for each row.
        """
        batch = make_rows(rows, device=self._device)
        if self._step_id is not None:
            return self._steps(batch, self._step_id)
        numbers: FloatArray = self._head(self._states.forward(batch), batch).cpu().numpy()
        return numbers

    def _steps(self, batch: RowBatch, step_id: int) -> list[FloatArray]:
        is_step = batch.token_ids == step_id
        numbers = self._head.apply_layers(self._states.forward(batch)[is_step].float())
        counts = [int(part.sum()) for part in torch.split(is_step, list(batch.lengths))]
        return [part.cpu().numpy() for part in torch.split(numbers, counts)]

    @torch.inference_mode()
    def hidden(self, row: Row) -> FloatArray:
        """Return the final hidden states [num_tokens, hidden_size] of one row, in float32."""
        batch = make_rows([row], device=self._device)
        states: FloatArray = self._states.forward(batch).float().cpu().numpy()
        return states

    @torch.inference_mode()
    def scores(self, row: Row) -> FloatArray:
        """Return the outputs of the head's layers for each token of a row [num_tokens, size]."""
        batch = make_rows([row], device=self._device)
        numbers = self._head.apply_layers(self._states.forward(batch).float())
        scores: FloatArray = numbers.cpu().numpy()
        return scores
