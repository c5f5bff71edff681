"""Products with quantised weights: y = x W^T + b, where W is int8, float8 or int4 with scales.

- int8 and float8 weights are multiplied with rows that are quantised on the way, in sums of int32
  or float32; scales of rows and outputs are applied to the sum.
- float8 in blocks of 128 x 128 with rows in groups of 128 (DeepSeek-V3, arXiv:2412.19437): scales
  are applied to the sum of each 128 inputs.
- int4 in groups of inputs: rows stay as they are, weights are (q - zero) * scale.

What stands here in torch is the specification of the kernels in `gpu/`, and serves where those do
not. Knows no checkpoints; `int4.py` knows how others order the bits of int4.

Legend: T rows, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.quantise import (
    GROUP,
    quantise_fp8_groups_reference,
    quantise_fp8_reference,
    quantise_int8_reference,
)

BLOCK = GROUP  # of outputs and inputs that share a scale in `Fp8BlockWeight`
MAX_HALF = 64  # inputs whose int4 share bytes with as many others


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A weight whose outputs have a scale each.

    values:  [O, I] int8
    scales:  [O] float32
    """

    values: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight whose outputs have a scale each; one for all is repeated.

    values:       [O, I] float8_e4m3fn
    scales:       [O] float32
    input_scale:  [1] float32, of all rows that are multiplied with it; None = of each row
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8BlockWeight:
    """A weight, or one for each of E experts, with a scale for each block of 128 x 128.

    values:  [O, I] or [E, O, I] float8_e4m3fn
    scales:  [blocks of O, blocks of I] or [E, ...] float32; blocks at the ends may be smaller
    """

    values: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """Return the weight in float32, in the shape of `values`."""
        outputs, inputs = self.values.shape[-2:]
        scales = self.scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return self.values.float() * scales[..., :outputs, :inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A weight of 4 bits, scaled in groups of inputs; `int4.pack_int4` makes it.

    values:  [O, bytes] uint8. Inputs are in runs of two halves of h = min(64, group_size) each;
             byte j of a run has input j in its low bits and input h + j in its high ones, so that a
             kernel splits a block of bytes into two blocks of inputs in order.
    scales:  [G, O] of any float type
    zeros:   [G, O] uint8
    inputs:  I; bytes go on to the end of a run
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    inputs: int
    group_size: int

    @property
    def half(self) -> int:
        """Inputs of half a run."""
        return min(MAX_HALF, self.group_size)

    def dequantised(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        runs = self.values.view(len(self.values), -1, self.half)
        values = torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)[:, : self.inputs]
        group = torch.arange(self.inputs, device=values.device) // self.group_size
        return (values.float() - self.zeros[group].T.float()) * self.scales[group].T.float()


QuantisedWeight = Int8Weight | Fp8Weight | Fp8BlockWeight | Int4Weight


def linear_quant(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute x W^T + b.

    x:     [T, I] bfloat16, float16 or float32, each row in one piece
    bias:  [O], any float type
    out:   [T, O] of the type of `x`, in one piece, to be overwritten; None = new memory

    Makes of GPU without products of float8_e4m3fn (sm_80, sm_86, gfx942) multiply float8 weights
    with rows as they are: more exact, and as fast where reading weights is what takes the time.

    Returns `out`, in the dtype of `x`.
    Raises ValueError where shapes do not fit.
    """
    outputs, inputs = weight.values.shape
    inputs = weight.inputs if isinstance(weight, Int4Weight) else inputs
    if x.shape[1:] != (inputs,):
        raise ValueError(f"rows of {list(x.shape[1:])} for a weight of {inputs} inputs")
    if out is None:
        out = x.new_empty(len(x), outputs)
    if out.shape != (len(x), outputs) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, not {x.dtype} of rows x outputs")
    if by_triton(x.device):
        from remora.kernels.gpu import linear_quant as kernels

        kernels.multiply(x, weight, bias, out)
        return out
    return out.copy_(linear_quant_reference(x, weight, bias))


def linear_quant_reference(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None
) -> Tensor:
    """`linear_quant` in torch, with float32 sums; rows are quantised as the weight asks."""
    match weight:
        case Int8Weight():
            values, scales = quantise_int8_reference(x)
            rows = values.float() * scales[:, None]
        case Fp8Weight():
            values, scales = quantise_fp8_reference(x, weight.input_scale)
            rows = values.float() * scales[:, None]
        case Fp8BlockWeight():
            values, scales = quantise_fp8_groups_reference(x)
            of_inputs = scales.T.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
            rows = values.float() * of_inputs
        case Int4Weight():
            rows = x.float()
    product = F.linear(rows, weight.dequantised(), None if bias is None else bias.float())
    return product.to(x.dtype)
