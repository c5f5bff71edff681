"""A draft head on a CPU, as a native step program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.graphs import step_norms
from remora.engine.graphs.step_program import fill_batch
from remora.engine.layers.norm import Norm
from remora.engine.runner.inputs import StepInputs
from remora.engine.sampling.token_sampler import TokenSampler
from remora.engine.spec.heads.head import DraftHead
from remora.engine.spec.heads.program import HeadProgram
from remora.kernels.cpu.norms import NormWeights


class NativePass:
    """HeadPass of a step program; embeddings and norms, which are small, are computed here."""

    def __init__(
        self,
        head: DraftHead,
        program: HeadProgram,
        token_sampler: TokenSampler,
        *,
        embedding: Tensor,
        embedding_scale: float,
    ) -> None:
        """Join the parts.

        embedding:        [vocab_size, H] of the target
        embedding_scale:  factor on its rows
        """
        self.token_sampler, self.draft_ids = token_sampler, head.draft_ids
        self._config, self._program = head.config, program
        self._embedding_norm = _converted(head.embedding_norm)
        self._hidden_norm = _converted(head.hidden_norm)
        self._last_norm = _converted(head.decoder.norm if head.config.own_norm else None)
        self._embedding, self._embedding_scale = embedding, embedding_scale

    def run(self, inputs: StepInputs, states: Tensor, *, is_target: bool) -> tuple[Tensor, Tensor]:
        """Run the program; see `HeadPass`."""
        program, count = self._program, inputs.num_tokens
        embedded = F.embedding(torch.from_numpy(inputs.token_ids), self._embedding).float()
        embedded = embedded * self._embedding_scale
        embedded = _normalised(self._embedding_norm, embedded)
        size = embedded.shape[1]
        if program.inputs is None:
            states = _normalised(self._hidden_norm, states.float())
            order = (states, embedded) if self._config.states_first else (embedded, states)
            program.joined[:count, : 2 * size] = torch.cat(order, dim=1)
            program.join(count)
        else:
            if is_target:
                program.joined[:count, : states.shape[1]] = states
                program.join(count)
            else:
                program.stream[:count, :size] = states
            program.inputs[:count, :size] = embedded
            program.inputs[:count, size : 2 * size] = _normalised(
                self._hidden_norm, program.stream[:count, :size]
            )
        inputs = replace(inputs, adapters=np.zeros_like(inputs.adapters))
        fill_batch(program.batch, inputs)
        program.layer(count, len(inputs.rows))
        outputs = program.stream[torch.from_numpy(inputs.logit_index), :size]
        num_rows = len(outputs)
        if not num_rows:
            return program.logits[:0], outputs
        final = _normalised(self._last_norm, outputs)
        program.final[:num_rows, :size] = final
        logits = program.head(num_rows)
        return logits, final if self._config.kind == "mtp" else outputs

    def close(self) -> None:
        """Do nothing: the target's pass closes the threads."""


def _converted(norm: Norm | None) -> NormWeights | None:
    return None if norm is None else step_norms.of_rows(norm, residual_scale=1.0)


def _normalised(norm: NormWeights | None, x: Tensor) -> Tensor:
    """Normalise rows in float32."""
    if norm is None:
        return x
    if norm.is_centered:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.epsilon)
