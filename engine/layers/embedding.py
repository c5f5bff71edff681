"""Token embedding, and the head that projects back to the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.layers.linear import Linear, allocate_weight
from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import UpdatePlace
from remora.kernels.linear import linear_to_float32
from remora.kernels.lora import NO_GROUPS, LowRankSlots, RowGroups


class Embedding:
    """Lookup of rows of `weight` [held vocabulary, hidden_size] by token id.

    adapters:  low-rank updates of the rows, for tokens with an adapter; None = no slots
    """

    adapters: LowRankSlots | None = None

    def __init__(
        self, vocabulary: Axis, hidden_size: int, *, dtype: torch.dtype, device: str
    ) -> None:
        self.vocabulary = vocabulary
        self.weight = allocate_weight((len(vocabulary.held), hidden_size), dtype, device)

    def __call__(self, token_ids: Tensor, groups: RowGroups = NO_GROUPS) -> Tensor:
        """Look up [num_tokens] ids; returns a new tensor [num_tokens, hidden_size].

        Rows of tokens that other ranks hold are zero, so that a sum over ranks is complete.
        """
        if self.vocabulary.is_whole:
            return self._rows(token_ids, groups)
        held = self.vocabulary.held
        is_absent = (token_ids < held.start) | (token_ids >= held.stop)
        places = (token_ids - held.start).masked_fill_(is_absent, 0)
        return self._rows(places, groups).masked_fill_(is_absent.unsqueeze(1), 0)

    def allocate_slots(self, num_slots: int, max_rank: int) -> LowRankSlots:
        """Allocate `adapters`: `num_slots` slots for updates of at most `max_rank`."""
        num_tokens, size = self.weight.shape
        device = str(self.weight.device)
        self.adapters = LowRankSlots(
            num_slots, num_tokens, [size], max_rank, dtype=self.weight.dtype, device=device
        )
        return self.adapters

    def place(self) -> UpdatePlace:
        """Return the slots for updates of the weight, which must be allocated."""
        assert self.adapters is not None
        held = slice(self.vocabulary.held.start, self.vocabulary.held.stop)
        return UpdatePlace(self.adapters, 0, outputs=slice(None), inputs=held, is_lookup=True)

    def _rows(self, places: Tensor, groups: RowGroups) -> Tensor:
        rows = F.embedding(places, self.weight)
        if self.adapters is not None:
            self.adapters.add_looked_up(places, rows, groups)
        return rows

    def tensors(self, name: str) -> Iterator[tuple[str, Shard]]:
        """Yield the checkpoint name and the shard of it that this rank holds."""
        if len(self.vocabulary.held) > 0:
            axes = (self.vocabulary, Axis.whole(self.weight.shape[1]))
            yield f"{name}.weight", Shard(memory=self.weight, axes=axes)


class Head:
    """Projection of hidden states to logits, with its own weight or the embedding's."""

    def __init__(
        self,
        name: str,
        vocabulary: Axis,
        hidden_size: int,
        *,
        tied: Embedding | None,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """Allocate the weight.

        name:  of the weight in the checkpoint
        tied:  the embedding whose weight it shares; None = its own weight
        scale, soft_cap:  factor on logits, and then c * tanh(logits / c) for a cap c
        """
        assert tied is None or not bias, "a head with a bias has a weight of its own"
        self.tied = tied is not None
        self.scale, self.soft_cap = scale, soft_cap
        self.linear = Linear(
            Axis.whole(hidden_size),
            {name: vocabulary},
            bias=bias,
            dtype=dtype,
            device=device,
            borrowed=None if tied is None else tied.weight,
        )
        self.linear.product = linear_to_float32

    def __call__(self, hidden: Tensor, groups: RowGroups = NO_GROUPS) -> Tensor:
        """Project [num_rows, hidden_size] to float32 logits [num_rows, held vocabulary]."""
        logits = self.linear(hidden, groups).float()
        if self.scale != 1.0:
            logits *= self.scale
        return logits if self.soft_cap is None else cap(logits, self.soft_cap)

    def pack(self) -> None:
        """Pack the projection; a tied one becomes a copy of the embedding's weight."""
        self.linear.pack()

    def tensors(self) -> Iterator[tuple[str, Shard]]:
        """Yield the checkpoint name and the shard of it that this rank holds; none if tied."""
        if not self.tied:
            yield from self.linear.tensors("")


def cap(logits: Tensor, soft_cap: float) -> Tensor:
    """Keep logits between -soft_cap and soft_cap, in place."""
    return logits.div_(soft_cap).tanh_().mul_(soft_cap)
