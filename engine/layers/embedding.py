"""Token embedding, and the head that projects back to the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.layers.linear import Linear


class Embedding:
    """A row of `weight` [vocab_size, hidden_size] for each token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: str
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up [num_tokens] ids; returns a new tensor [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint name and the tensor that it fills."""
        yield f"{name}.weight", self.weight


class Head:
    """Projection of hidden states to logits, with a weight of its own or the embedding's."""

    def __init__(self, embedding: Embedding, *, tied: bool) -> None:
        weight = embedding.weight
        vocab_size, hidden_size = weight.shape
        self.tied = tied
        self.linear = Linear(
            hidden_size,
            {"lm_head": vocab_size},
            bias=False,
            dtype=weight.dtype,
            device="meta" if tied else str(weight.device),
        )
        if tied:
            self.linear.weight = weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project [num_rows, hidden_size] to float32 logits [num_rows, vocab_size]."""
        return self.linear(hidden).float()

    def pack(self) -> None:
        """Pack the projection; a tied one becomes a copy beside the embedding."""
        self.linear.pack()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint name and the tensor that it fills; nothing when tied."""
        if not self.tied:
            yield from self.linear.tensors("")
