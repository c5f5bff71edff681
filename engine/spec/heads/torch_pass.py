"""A draft head as torch operations: a `Model` that reads given states, and the pass over it.

The states of a step lie at a fixed place, where a captured graph reads them, too. So whatever runs
models runs heads: operations one by one, or graphs on a device. Knows nothing of rows.

Legend: T tokens of the step, R rows of logits, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from remora.engine.layers.embedding import Embedding, Head
from remora.engine.layers.mlp import MLP
from remora.engine.parallel.group import ALONE
from remora.engine.protocols import AttentionBackend, ForwardPass
from remora.engine.runner.batch import ForwardBatch
from remora.engine.runner.inputs import StepInputs
from remora.engine.sampling.token_sampler import TokenSampler
from remora.engine.spec.heads.head import DraftHead
from remora.kernels.lora import NO_GROUPS, RowGroups
from remora.kernels.memory import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a head uses of its target, whole.

    scale:  factor on embeddings
    """

    embedding: Embedding
    scale: float
    head: Head


class HeadModel:
    """`Model` of a loaded draft head; its final hidden states are those to continue from.

    given:      [most tokens, H] states of the step's tokens, as `project` returns them, which the
                caller writes
    draft_ids:  as of DraftHead
    """

    def __init__(self, head: DraftHead, ends: Ends, *, max_tokens: int) -> None:
        self.vocab_size = head.decoder.vocab_size
        self._head, self._config, self._ends = head, head.config, ends
        self._block = head.decoder.blocks[0]
        self._rotary = head.decoder.rotaries[0]
        self._to_logits = head.decoder.head if head.config.own_head else ends.head
        self.draft_ids = head.draft_ids
        weight = head.fc.weight
        shape = (max_tokens, head.config.decoder.hidden_size)
        self.given = torch.zeros(shape, dtype=weight.dtype, device=ends.embedding.weight.device)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        """Return the target's states [T, state_size] as `given` takes them, [T, H]."""
        states = states.to(self.given.dtype)
        return self._head.fc(states) if self._config.kind == "eagle3" else states

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the states [T, H] to continue from; MTP layers normalise them."""
        embedded = self._ends.embedding(batch.token_ids)
        if self._ends.scale != 1.0:
            embedded *= self._ends.scale
        states = self.given[: len(embedded)]
        head = self._head
        if head.embedding_norm is not None:
            embedded = head.embedding_norm(embedded)
        normalised = states if head.hidden_norm is None else head.hidden_norm(states)
        first, second = embedded, normalised
        if self._config.states_first:
            first, second = second, first
        joined = torch.cat((first, second), dim=1)
        angles = self._rotary.angles(batch.positions, self.given.dtype)
        delta: Tensor | None
        if self._config.kind == "eagle3":  # attention reads both inputs, and adds to the states
            attended = self._block.attention(joined, *angles, batch, attention, ALONE)
            mlp_norm = self._block.mlp_norm
            assert mlp_norm is not None, "the layer is a Llama's"
            hidden, stream = mlp_norm.add(attended, states.clone())
            delta = cast("MLP", self._block.mlp)(hidden, NO_GROUPS)
        else:
            stream = head.fc(joined)
            delta, stream = self._block(None, stream, angles, batch, attention, ALONE)
        if self._config.kind == "mtp":
            return head.decoder.norm.add(delta, stream)[0]
        return stream if delta is None else stream.add_(delta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, adapters: RowGroups = NO_GROUPS) -> Tensor:
        """Project states [R, H] to float32 logits [R, vocab_size]."""
        if self._config.kind == "eagle3":
            hidden = self._head.decoder.norm(hidden)
        return self._to_logits(hidden)


class TorchPass:
    """HeadPass over a `HeadModel` and what runs it."""

    def __init__(self, model: HeadModel, forward: ForwardPass, token_sampler: TokenSampler) -> None:
        """Join the parts; the pass closes `forward`."""
        self.token_sampler = token_sampler
        self._model, self._forward = model, forward
        self._device = model.given.device
        ids = model.draft_ids
        self.draft_ids = None if ids is None else ids.to(self._device)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, states: Tensor, *, is_target: bool) -> tuple[Tensor, Tensor]:
        """Run the model; see `HeadPass`."""
        model, count = self._model, inputs.num_tokens
        model.given[:count] = model.project(states) if is_target else states
        adapters = np.zeros_like(inputs.adapters)
        logits = self._forward.forward(replace(inputs, adapters=adapters, windows=None))
        index = to_device(inputs.logit_index, self._device)
        return logits, self._forward.hidden(0, count).index_select(0, index)

    def close(self) -> None:
        """Close the pass that runs the model."""
        self._forward.close()
