"""The forward pass as a native step program: one call a step, the CPU's counterpart of a graph.

`step_builder.py` builds it. The residual stream is float32.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.embeddings import EmbeddedTokens
from remora.engine.graphs.step_weights import Piece
from remora.engine.runner.inputs import StepInputs
from remora.kernels.cpu.buffers import Batch
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.program import Program


class StepProgram:
    """ForwardPass that runs in the native library.

    weight_bytes:  bytes of packed weights that one step reads, without the embedding table
    """

    def __init__(
        self,
        program: Program,
        *,
        num_embedding: int,
        head_start: int,
        logits: Tensor,
        stream: Tensor,
        norm: NormWeights,
        weight_bytes: int,
        head: tuple[Piece, ...],
        embedding: Tensor,
        pages: Sequence[Tensor] = (),
        window_pages: Sequence[Tensor] = (),
        captures: Sequence[int] = (),
        residual_scale: float = 1.0,
        embedding_scale: float = 1.0,
    ) -> None:
        """See `step_builder.StepProgramBuilder`.

        num_embedding:  operations that look tokens up, the first ones
        head_start:  index of the first operation on rows of logits
        logits:      [most rows, vocab_size], output buffer
        stream:      [most tokens, hidden_size] float32, output of the last layer
        norm:        before the head
        head:        packed weight of the head
        embedding:   [vocab_size, hidden_size] table of inputs, for the stream as it is stored
        pages:       [num_layers, num_pages, bytes of a page] KV memory of layers that share pages
        window_pages:  the same of layers with a window and a pool of their own
        captures:    indices of the operations before which the stream is captured
        residual_scale:  that the stream is divided by
        embedding_scale:  factor that is in `embedding`
        """
        self._program = program
        self._num_embedding = num_embedding
        self._head_start = head_start
        self._logits = logits
        self._stream = stream
        self._norm = norm
        self.weight_bytes = weight_bytes
        self.head, self.embedding = head, embedding
        self._pages = tuple(pages)
        self._window_pages = tuple(window_pages)
        self._captures = sorted({*captures})
        self._order = [self._captures.index(each) for each in captures]
        self.residual_scale = residual_scale
        self._embedding_scale = embedding_scale
        self._captured = stream.new_empty((len(self._captures), *stream.shape))

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size], overwritten by the next call."""
        num_tokens, num_rows = inputs.num_tokens, len(inputs.rows)
        num_logits = len(inputs.logit_index)
        for source, target in inputs.copies.T.tolist():
            for pages in self._pages:
                pages[:, target] = pages[:, source]
        fill_batch(self._program.batch, inputs)
        first = 0
        if inputs.embedded is not None:
            first = self._num_embedding
            self._program.run(num_tokens, num_rows, num_logits, last=first)
            self._put(inputs.embedded)
        for captured, stop in zip(self._captured, self._captures, strict=True):
            self._program.run(num_tokens, num_rows, num_logits, first=first, last=stop)
            captured[:num_tokens] = self._stream[:num_tokens]
            first = stop
        self._program.run(num_tokens, num_rows, num_logits, first=first)
        return self._logits[:num_logits]

    def _put(self, embedded: EmbeddedTokens) -> None:
        """Replace looked-up rows by given ones, which are rounded and scaled as the table's."""
        rows = torch.from_numpy(embedded.rows).to(self.embedding.dtype)
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        self._stream[torch.from_numpy(embedded.places), : rows.shape[1]] = rows.float()

    def captured(self, tokens: Tensor) -> Tensor:
        """Return the inputs of the captured layers for tokens [N] of the latest step, in order.

        float32 [N, captured layers * hidden_size]
        """
        states = [self._captured[place, tokens] for place in self._order]
        return torch.cat(states, dim=1) * self.residual_scale

    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        count = last - first
        self._program.batch.logit_index[:count] = range(first, last)
        self._program.run(0, 0, count, first=self._head_start)
        return self._logits[:count]

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        return self._normalised(self._stream[first:last])

    def final(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states of tokens [N] of the latest step: [N, hidden_size]."""
        return self._normalised(self._stream[tokens])

    def _normalised(self, stream: Tensor) -> Tensor:
        norm = self._norm
        shape = norm.weight.shape
        if norm.is_centered:
            return F.layer_norm(stream, shape, norm.weight, norm.bias, norm.epsilon)
        return F.rms_norm(stream, shape, norm.weight, norm.epsilon)

    def page_memory(self) -> list[Tensor]:
        """Return the memory of K and V."""
        return [*self._pages, *self._window_pages]

    def close(self) -> None:
        """End the threads."""
        self._program.team.close()


def fill_batch(batch: Batch, inputs: StepInputs) -> None:
    """Write a step's inputs to a program's arrays."""
    num_tokens, num_rows = inputs.num_tokens, len(inputs.rows)
    batch.token_ids[:num_tokens] = inputs.token_ids
    batch.positions[:num_tokens] = inputs.positions
    batch.slots[:num_tokens] = inputs.slots
    batch.starts[: num_rows + 1] = inputs.starts
    batch.lengths[:num_rows] = inputs.lengths
    batch.table_rows[:num_rows] = inputs.rows
    batch.logit_index[: len(inputs.logit_index)] = inputs.logit_index
    batch.adapters[:num_tokens] = inputs.adapters
    if inputs.windows is not None:
        batch.window_slots[:num_tokens] = inputs.windows.slots
