"""The one linear layer of every model.

Projections that share an input are fused: one weight whose output columns are named parts, each
with a place of its own in the checkpoint. Of each part, and of the inputs, a rank may hold a range.
Knows nothing of what the parts mean, nor of other ranks: where a range of the inputs is held, the
product is one summand of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import UpdatePlace
from remora.kernels.linear import linear, pack_weight
from remora.kernels.lora import NO_GROUPS, LowRankSlots, RowGroups
from remora.kernels.memory import buffer


def allocate_weight(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Allocate a weight; on a CPU from the system itself, which gets it back once it is packed."""
    if device == "cpu":
        return buffer(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear:
    """y = x W^T + b.

    weight:    [what is held of the parts, what is held of the inputs]
    owns_weight:  whether nobody else reads the weight's memory
    bias:      [what is held of the parts] or None
    adapters:  low-rank updates of the weight, for rows that ask for one; None = there are none
    product:   what multiplies
    """

    adapters: LowRankSlots | None = None
    product: Multiply = staticmethod(linear)

    def __init__(
        self,
        inputs: Axis,
        parts: Mapping[str, Axis],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: str,
        borrowed: Tensor | None = None,
    ) -> None:
        """Allocate it; `borrowed` is a weight that somebody else has memory for."""
        self.inputs = inputs
        self.parts = dict(parts)
        out_features = sum(len(part.held) for part in self.parts.values())
        self.owns_weight = borrowed is None
        if borrowed is None:
            borrowed = allocate_weight((out_features, len(inputs.held)), dtype, device)
        self.weight = borrowed
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor, groups: RowGroups = NO_GROUPS) -> Tensor:
        """Project [num_tokens, held inputs] to [num_tokens, held parts], by the rows' adapters."""
        y = self.product(x, self.weight, self.bias)
        if self.adapters is not None:
            self.adapters.add(x, y, groups)
        return y

    def allocate_slots(self, num_slots: int, max_rank: int) -> LowRankSlots:
        """Allocate `adapters`: a slot for each, of `max_rank` at most."""
        parts = [len(part.held) for part in self.parts.values()]
        self.adapters = LowRankSlots(
            num_slots,
            len(self.inputs.held),
            parts,
            max_rank,
            dtype=self.weight.dtype,
            device=str(self.weight.device),
        )
        return self.adapters

    def places(self, prefix: str) -> Iterator[tuple[str, UpdatePlace]]:
        """Yield each checkpoint name and the place for updates of it, where there is room."""
        if self.adapters is None:
            return
        inputs = _slice(self.inputs)
        for index, (name, part) in enumerate(self.parts.items()):
            place = UpdatePlace(self.adapters, index, outputs=_slice(part), inputs=inputs)
            yield f"{prefix}{name}.weight", place

    def pack(self) -> None:
        """Put the loaded weight into the layout that this machine multiplies fastest.

        The views out of `tensors` are void afterwards.
        """
        if self.weight.numel() > 0:
            self.weight = pack_weight(self.weight)

    def release(self) -> tuple[Tensor, Tensor | None]:
        """Hand weight and bias over to who computes with them from now on; this layer cannot."""
        weight, bias = self.weight, self.bias
        self.weight, self.bias = weight.new_empty(0), None
        return weight, bias

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the part of it that this layer's memory is for."""
        start = 0
        for name, part in self.parts.items():
            rows = slice(start, start + len(part.held))
            start = rows.stop
            if len(part.held) == 0:
                continue
            weight = self.weight[rows]
            yield f"{prefix}{name}.weight", Shard(memory=weight, axes=(part, self.inputs))
            if self.bias is not None:
                yield f"{prefix}{name}.bias", Shard(memory=self.bias[rows], axes=(part,))


def _slice(axis: Axis) -> slice:
    return slice(axis.held.start, axis.held.stop)
