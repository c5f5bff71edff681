"""Expert layer: the weighted sum of the gated MLPs that were chosen for each token.

Token-expert pairs are sorted by expert, so that an expert's weight is multiplied with all its
tokens at once and weights of unchosen experts are not read. With Triton the kernels of `gpu/moe.py`
compute, otherwise torch. `moe_routing.py` chooses the experts.

Legend: T tokens, k experts of a token, E experts held here, H hidden size, I inner size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.linear import linear
from remora.kernels.moe_rules import SILU, Gating
from remora.kernels.moe_weights import (
    NO_BIASES,
    Biases,
    ExpertWeight,
    StackableWeight,
    of_expert,
    shape_of,
)
from remora.kernels.quantised.quant_formats import BLOCK, GROUP, Fp8BlockWeight
from remora.kernels.quantised.quantise import quantise_fp8_groups_reference


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    biases: Biases = NO_BIASES,
    gating: Gating = SILU,
    first_expert: int = 0,
    invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the sum over a token's experts of weight * down(gating(gate(x), up(x))).

    x:             [T, H] bfloat16, float16 or float32, each row contiguous
    ids:           [T, k] int32, no expert twice in a row
    weights:       [T, k] float32, factors of the experts' outputs
    gate_up:       [E, 2 * I, H] of the type of `x`, gates first, or quantised in blocks or groups
    down:          [E, H, I], likewise
    biases:        [E, 2 * I] of gates and ups, and [E, H] of outputs; None = no bias
    first_expert:  id of the first expert held here; experts of other ranks, and ids below 0, add
                   nothing, so that results can be summed over ranks
    invariant:     with Triton, a row's bits do not depend on other rows
    out:           [T, H], overwritten; None = new memory

    The sum is float32, in the order of a row's ids, so its bits are reproducible. Between the
    products values are rounded to the type of `x`, or for float8 quantised in groups of 128. On a
    GPU float8 needs tensor cores with that format (sm_89 and newer; not gfx942). Weights in groups
    must have their inputs in order.

    Returns `out`, in the dtype of `x`.
    Raises ValueError for shapes that do not fit, NotImplementedError for a GPU without float8.
    """
    experts, wide, hidden = shape_of(gate_up)
    if shape_of(down) != (experts, hidden, wide // 2) or x.shape[1] != hidden:
        raise ValueError(
            f"rows of {x.shape[1]}, gate_up {list(shape_of(gate_up))}"
            f" and down {list(shape_of(down))}"
        )
    if isinstance(gate_up, Fp8BlockWeight) and wide // 2 % BLOCK != 0:
        raise ValueError(f"the inner size is {wide // 2}; it must be a multiple of {BLOCK}")
    if out is None:
        out = torch.empty((len(x), hidden), dtype=x.dtype, device=x.device)
    how: dict[str, Any] = {"biases": biases, "gating": gating, "first_expert": first_expert}
    if by_triton(x.device):
        from remora.kernels.gpu import moe as kernels

        kernels.moe(x, ids, weights, gate_up, down, out, invariant=invariant, **how)
        return out
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        return moe_by_expert(x, ids, weights, gate_up, down, out=out, **how)
    return out.copy_(moe_reference(x, ids, weights, gate_up, down, **how))


def multiplies(like: StackableWeight, device: torch.device, inner: int) -> bool:
    """Return whether `moe` takes weights of a format on a device, for this inner size."""
    if not isinstance(like, Fp8BlockWeight):
        return True
    if inner % BLOCK != 0:
        return False
    if not by_triton(device):
        return True
    from remora.kernels.gpu.arch import has_fp8

    return has_fp8(device)


def moe_by_expert(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor] | Tensor,
    down: Sequence[Tensor] | Tensor,
    *,
    biases: Biases = NO_BIASES,
    gating: Gating = SILU,
    first_expert: int = 0,
    out: Tensor,
) -> Tensor:
    """`moe` with two products for each chosen expert.

    gate_up, down:  one weight per expert, plain or from `linear.pack_weight`
    """
    wide_bias, down_bias = biases
    flat, top_k = ids.flatten().long() - first_expert, ids.shape[1]
    order = flat.argsort(stable=True)
    rows = x[order // top_k]
    outputs = torch.zeros((len(order), out.shape[1]), dtype=x.dtype, device=x.device)
    start = 0
    for expert, count in sorted(Counter(flat.tolist()).items()):
        stop = start + count
        if 0 <= expert < len(gate_up):
            wide = linear(rows[start:stop], gate_up[expert], _bias_of(wide_bias, expert))
            inner = through_gates(wide, gating)
            outputs[start:stop] = linear(inner, down[expert], _bias_of(down_bias, expert))
        start = stop
    in_place = torch.empty_like(outputs, dtype=torch.float32)
    in_place[order] = outputs.float()
    summed = (in_place.view(len(x), top_k, out.shape[1]) * weights.unsqueeze(2)).sum(dim=1)
    return out.copy_(summed)


def through_gates(wide: Tensor, gating: Gating) -> Tensor:
    """Apply `Gating` to [n, 2 * I], gates first; return [n, I]."""
    gate, up = wide.chunk(2, dim=1)
    if gating == SILU:
        return F.silu(gate) * up
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gating.sharpness * gate) * (up + gating.offset)


def _bias_of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def moe_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    biases: Biases = NO_BIASES,
    gating: Gating = SILU,
    first_expert: int = 0,
) -> Tensor:
    """`moe` in torch, with float32 sums."""
    wide_bias, down_bias = biases
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(shape_of(gate_up)[0]):
        token, place = (ids == expert + first_expert).nonzero(as_tuple=True)
        wide = _multiply(x[token], gate_up, expert)
        if wide_bias is not None:
            wide = wide + wide_bias[expert].float()
        inner = through_gates(wide, gating).to(x.dtype)
        outputs = _multiply(inner, down, expert)
        if down_bias is not None:
            outputs = outputs + down_bias[expert].float()
        outputs = outputs.to(x.dtype).float()
        total.index_add_(0, token, outputs * weights[token, place][:, None])
    return total.to(x.dtype)


def _multiply(x: Tensor, weight: ExpertWeight, expert: int) -> Tensor:
    if isinstance(weight, Tensor):
        return x.float() @ weight[expert].float().T
    rows = x.float()
    if isinstance(weight, Fp8BlockWeight):
        values, scales = quantise_fp8_groups_reference(x)
        rows = values.float() * scales.T.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return rows @ of_expert(weight, expert).dequantised().T
