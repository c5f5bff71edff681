"""The linear layer of every model.

Projections that share an input are fused into one weight, whose outputs are named parts; each part
is a tensor of the checkpoint. A rank may hold a range of each part and of the inputs. Knows neither
the meaning of the parts nor other ranks: with a range of the inputs, the product is a partial sum.

On a GPU the weight may be quantised: then there is no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from remora.engine.parallel.shard import Axis, Shard
from remora.engine.protocols import UpdatePlace
from remora.kernels.linear import linear, pack_weight
from remora.kernels.lora import NO_GROUPS, LowRankSlots, RowGroups
from remora.kernels.memory import buffer
from remora.kernels.quantised.linear_quant import linear_quant_parts
from remora.kernels.quantised.quant_formats import (
    QuantisedWeight,
    num_bytes,
    tensors_of,
    with_tensors,
)


def allocate_weight(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Allocate a weight; on a CPU directly from the system, so that packing returns the memory."""
    if device == "cpu":
        return buffer(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear:
    """y = x W^T + b.

    owns_weight:  whether the weight's memory is used by this layer only
    weight_device: where the weight is loaded; bias and adapters are on the layer's device
    quantised: of consecutive outputs, in the place of `weight`; () = it is not quantised
    bias:      [held outputs] or None
    adapters:  low-rank updates of the weight, for rows with an adapter; None = no slots
    product:   the function that multiplies with `weight`
    """

    adapters: LowRankSlots | None = None
    product: Multiply = staticmethod(linear)
    quantised: tuple[QuantisedWeight, ...] = ()

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
        """Prepare to allocate the weight, or share the memory of `borrowed`."""
        self.inputs = inputs
        self.parts = dict(parts)
        self.dtype, self.device, self.weight_device = dtype, device, device
        self.out_features = sum(len(part.held) for part in self.parts.values())
        self.owns_weight = borrowed is None
        if borrowed is not None:
            self.weight = borrowed
        self.bias = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None

    @cached_property
    def weight(self) -> Tensor:
        """[held outputs, held inputs], allocated at its first use: `quantised` needs none."""
        shape = (self.out_features, len(self.inputs.held))
        return allocate_weight(shape, self.dtype, self.weight_device)

    def __call__(self, x: Tensor, groups: RowGroups = NO_GROUPS) -> Tensor:
        """Project [num_tokens, held inputs] to [num_tokens, held outputs], with rows' adapters."""
        if self.quantised:
            y = linear_quant_parts(x, self.quantised, self.bias)
        else:
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
            dtype=self.dtype,
            device=self.device,
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

    @property
    def num_bytes(self) -> int:
        """The bytes of a quantised weight."""
        return sum(map(num_bytes, self.quantised))

    def weight_tensors(self) -> list[Tensor]:
        """Return the tensors of the weight, quantised or not."""
        if not self.quantised:
            return [self.weight]
        return [tensor for each in self.quantised for tensor in tensors_of(each).values()]

    def set_weight_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors of the weight, in the order of `weight_tensors`."""
        given = iter(tensors)
        if self.quantised:
            self.quantised = tuple(with_tensors(each, given) for each in self.quantised)
        else:
            self.weight = next(given)

    def pack(self) -> None:
        """Convert the loaded weight to this machine's fastest layout.

        Invalidates the views that `tensors` returned. A quantised weight stays as it is.
        """
        if not self.quantised and self.weight.numel() > 0:
            self.weight = pack_weight(self.weight)

    def release(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias and drop them; the layer cannot compute afterwards."""
        weight, bias = self.weight, self.bias
        self.weight, self.bias = weight.new_empty(0), None
        return weight, bias

    def weights(self, prefix: str) -> dict[str, Axis]:
        """Return the checkpoint names of the parts that are held, and their outputs."""
        held = {name: part for name, part in self.parts.items() if len(part.held) > 0}
        return {f"{prefix}{name}.weight": part for name, part in held.items()}

    def tensors(self, prefix: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this layer holds unquantised."""
        start = 0
        for name, part in self.parts.items():
            rows = slice(start, start + len(part.held))
            start = rows.stop
            if len(part.held) == 0:
                continue
            if not self.quantised:
                weight = self.weight[rows]
                yield f"{prefix}{name}.weight", Shard(memory=weight, axes=(part, self.inputs))
            if self.bias is not None:
                yield f"{prefix}{name}.bias", Shard(memory=self.bias[rows], axes=(part,))


def _slice(axis: Axis) -> slice:
    return slice(axis.held.start, axis.held.stop)
