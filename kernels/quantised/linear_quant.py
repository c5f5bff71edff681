"""Products with quantised weights: y = x W^T + b, where W is int8, float8 or int4 with scales.

- int8 and float8 weights are multiplied with rows that are quantised first, with int32 or float32
  sums; scales of rows and outputs are applied to the sum.
- float8 in blocks of 128 x 128 with rows in groups of 128 (DeepSeek-V3, arXiv:2412.19437): scales
  are applied to the sum of each 128 inputs.
- int4, int8 and float4 in groups of inputs: rows are not quantised, weights are (q - zero) * scale
  or numbers of four bits * scale (MXFP4, NVFP4).

The torch code specifies the kernels of `gpu/` and is the fallback. Knows no checkpoints; `int4.py`
knows the bit layouts of int4 checkpoints.

Legend: T rows, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.quantised.quant_formats import (
    GROUP,
    Fp4GroupWeight,
    Fp8BlockWeight,
    Fp8Weight,
    GroupWeight,
    Int4Weight,
    Int8GroupWeight,
    Int8Weight,
    QuantisedWeight,
)
from remora.kernels.quantised.quantise import (
    quantise_fp8_groups_reference,
    quantise_fp8_reference,
    quantise_int8_reference,
)


def linear_quant(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute x W^T + b.

    x:     [T, I] bfloat16, float16 or float32, each row contiguous
    bias:  [O], any float type
    out:   [T, O] of the type of `x`, contiguous, overwritten; None = new memory

    GPUs without float8_e4m3fn products (sm_80, sm_86, gfx942) multiply float8 weights with rows
    that are not quantised: more exact, and as fast while reading weights is the bottleneck.

    Returns `out`, in the dtype of `x`.
    Raises ValueError where shapes do not fit.
    """
    outputs, inputs = weight.values.shape
    inputs = weight.inputs if isinstance(weight, GroupWeight) else inputs
    if x.shape[1:] != (inputs,):
        raise ValueError(f"rows of {list(x.shape[1:])} for a weight of {inputs} inputs")
    if out is None:
        out = x.new_empty(len(x), outputs)
    if out.shape != (len(x), outputs) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}; it must be a contiguous {x.dtype} [T, O]"
        )
    if by_triton(x.device):
        from remora.kernels.gpu import linear_quant as kernels

        if isinstance(weight, GroupWeight) and weight.order is not None:
            x = x.index_select(1, weight.order)
        kernels.multiply(x, weight, bias, out)
        return out
    return out.copy_(linear_quant_reference(x, weight, bias))


def linear_quant_parts(
    x: Tensor, parts: Sequence[QuantisedWeight], bias: Tensor | None = None
) -> Tensor:
    """`linear_quant` with one weight or more, each of which has the next outputs."""
    if len(parts) == 1:
        return linear_quant(x, parts[0], bias)
    sizes = [len(part.values) for part in parts]
    biases = (None,) * len(parts) if bias is None else torch.split(bias, sizes)
    made = [linear_quant(x, part, each) for part, each in zip(parts, biases, strict=True)]
    return torch.cat(made, dim=1)


def linear_quant_reference(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None
) -> Tensor:
    """`linear_quant` in torch, with float32 sums; rows are quantised as the weight requires."""
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
        case Int4Weight() | Int8GroupWeight() | Fp4GroupWeight():
            rows = x.float()
    product = F.linear(rows, weight.dequantised(), None if bias is None else bias.float())
    return product.to(x.dtype)
