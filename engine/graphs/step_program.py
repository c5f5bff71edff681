"""The forward pass as a native step program: one call a step, the CPU's counterpart of a graph.

`step_builder.py` builds it. The residual stream is float32.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from remora.engine.runner.inputs import StepInputs
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
        head_start: int,
        logits: Tensor,
        stream: Tensor,
        norm: NormWeights,
        weight_bytes: int,
    ) -> None:
        """See `step_builder.StepProgramBuilder`.

        head_start:  index of the first operation on rows of logits
        logits:      [most rows, vocab_size], output buffer
        stream:      [most tokens, hidden_size] float32, output of the last layer
        norm:        before the head
        """
        self._program = program
        self._head_start = head_start
        self._logits = logits
        self._stream = stream
        self._norm = norm
        self.weight_bytes = weight_bytes

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size], overwritten by the next call."""
        batch = self._program.batch
        num_tokens, num_rows = inputs.num_tokens, len(inputs.rows)
        num_logits = len(inputs.logit_index)
        batch.token_ids[:num_tokens] = inputs.token_ids
        batch.positions[:num_tokens] = inputs.positions
        batch.slots[:num_tokens] = inputs.slots
        batch.starts[: num_rows + 1] = inputs.starts
        batch.lengths[:num_rows] = inputs.lengths
        batch.table_rows[:num_rows] = inputs.rows
        batch.logit_index[:num_logits] = inputs.logit_index
        batch.adapters[:num_tokens] = inputs.adapters
        if inputs.windows is not None:
            batch.window_slots[:num_tokens] = inputs.windows.slots
        self._program.run(num_tokens, num_rows, num_logits)
        return self._logits[:num_logits]

    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        count = last - first
        self._program.batch.logit_index[:count] = range(first, last)
        self._program.run(0, 0, count, first=self._head_start)
        return self._logits[:count]

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        stream = self._stream[first:last]
        norm = self._norm
        shape = norm.weight.shape
        if norm.is_centered:
            return F.layer_norm(stream, shape, norm.weight, norm.bias, norm.epsilon)
        return F.rms_norm(stream, shape, norm.weight, norm.epsilon)

    def close(self) -> None:
        """End the threads."""
        self._program.team.close()
