"""The linear layer of every model.

Projections that share an input are fused into one weight, whose outputs are named parts; each part
is a tensor of the checkpoint. A rank may hold a range of each part and of the inputs. Knows neither
the meaning of the parts nor other ranks: with a range of the inputs, the product is a partial sum.
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
    """Allocate a weight; on a CPU directly from the system, so that packing returns the memory."""
    if device == "cpu":
        return buffer(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear:
    """y = x W^T + b.

    weight:    [held outputs, held inputs]
    owns_weight:  whether the weight's memory is used by this layer only
    bias:      [held outputs] or None
    adapters:  low-rank updates of the weight, for rows with an adapter; None = no slots
    product:   the function that multiplies
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
        """Allocate the weight, or share the memory of `borrowed`."""
        self.inputs = inputs
        self.parts = dict(parts)
        out_features = sum(len(part.held) for part in self.parts.values())
        self.owns_weight = borrowed is None
        if borrowed is None:
            borrowed = allocate_weight((out_features, len(inputs.held)), dtype, device)
        self.weight = borrowed
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor, groups: RowGroups = NO_GROUPS) -> Tensor:
        """Project [num_tokens, held inputs] to [num_tokens, held outputs], with rows' adapters."""
        y = self.product(x, self.weight, self.bias)
        if self.adapters is not None:
            self.adapters.add(x, y, groups)
        return y

    def allocate_slots(self, num_slots: int, max_rank: int) -> LowRankSlots:
        """Allocate `adapters`: `num_slots` slots for updates of at most `max_rank`."""
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
        """Yield each checkpoint name and the slots for its updates, if they are allocated."""
        if self.adapters is None:
            return
        inputs = _slice(self.inputs)
        for index, (name, part) in enumerate(self.parts.items()):
            place = UpdatePlace(self.adapters, index, outputs=_slice(part), inputs=inputs)
            yield f"{prefix}{name}.weight", place

    def pack(self) -> None:
        """Convert the loaded weight to this machine's fastest layout.

        Invalidates the views that `tensors` returned.
        """
        if self.weight.numel() > 0:
            self.weight = pack_weight(self.weight)

    def release(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias and drop them; the layer cannot compute afterwards."""
        weight, bias = self.weight, self.bias
        self.weight, self.bias = weight.new_empty(0), None
        return weight, bias

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this layer holds."""
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
