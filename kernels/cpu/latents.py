"""Operations before and after attention over latents (MLA), in step programs.

Legend: T tokens of a step, N heads, C elements of a latent, P rotary elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.packing import PackedWeight
from remora.kernels.cpu.program import Program
from remora.kernels.cpu.structs import (
    HeadsStruct,
    JoinedStruct,
    LatentsStruct,
    OutputStruct,
    WeightStruct,
)


def multiply_heads(
    program: Program,
    x: Rows,
    x_step: int,
    weights: Sequence[PackedWeight],
    out: Tensor,
    out_step: int,
) -> None:
    """Multiply each head of rows [T, heads * x_step] with its own weight, which is not grouped.

    out:  [T, heads * out_step] float32; out_step is at least `weight.out_columns`
    """
    weight = weights[0]
    heads = len(weights)
    if (
        x.format is not weight.format.of_rows
        or x.format.is_grouped
        or x.values.shape[1] < heads * x_step
        or out.shape[1] < heads * out_step
        or not (weight.k <= x_step and weight.out_columns <= out_step)
    ):
        raise ValueError(
            f"{x.format.name} rows {list(x.values.shape)} in steps of {x_step} and out "
            f"{list(out.shape)} in steps of {out_step} do not fit {heads} {weight.format.name} "
            f"weights [{weight.n}, {weight.k}]"
        )
    program.check_rows(x.values, out)
    to = OutputStruct(values=out.data_ptr(), stride=out.shape[1])
    settings = HeadsStruct(num_heads=heads, x_step=x_step, out_step=out_step)
    structs = (WeightStruct * heads)(*(each.struct() for each in weights))
    program.add("multiply_heads", settings, structs, x, to, keeps=(weights, out))


def join_latents(
    program: Program,
    absorbed: Tensor,
    step: int,
    query: Tensor,
    kept: Tensor,
    norm: NormWeights,
    heads: Tensor,
    *,
    num_heads: int,
    key_size: int,
    rotary_size: int,
) -> None:
    """Assemble the input of latent attention: heads [T, (N + 1) * (C + P)].

    absorbed:  [T, >= N * step] float32, each head's query in the latent space
    query:     [T, N * (key_size + P)] float32; each head's last P elements are used
    kept:      [T, C + P] float32; its first C elements, the latent, are normalised
    `query` and `kept` may be column ranges of wider tensors.
    """
    program.check_rows(absorbed, query, kept, heads)
    settings = LatentsStruct(
        num_heads=num_heads,
        key_size=key_size,
        rotary_size=rotary_size,
        norm=norm.struct(),
        absorbed=absorbed.data_ptr(),
        absorbed_stride=absorbed.stride(0),
        absorbed_step=step,
        query=query.data_ptr(),
        query_stride=query.stride(0),
        kept=kept.data_ptr(),
        kept_stride=kept.stride(0),
        heads=heads.data_ptr(),
        heads_stride=heads.stride(0),
    )
    program.add("join_latents", settings, keeps=(absorbed, query, kept, norm, heads))


def join_heads(
    program: Program, x: Tensor, step: int, num_heads: int, size: int, out: Rows
) -> None:
    """Concatenate the first `size` elements of each head of x [T, >= N * step] float32."""
    if x.shape[1] < num_heads * step or out.values.shape[1] < num_heads * size:
        raise ValueError(f"{list(x.shape)} do not fit {list(out.values.shape)}")
    program.check_rows(x, out.values)
    settings = JoinedStruct(
        x=x.data_ptr(), stride=x.shape[1], step=step, num_heads=num_heads, size=size
    )
    program.add("join_heads", settings, out.format, out, keeps=(x,))
