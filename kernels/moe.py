"""A layer of experts: each token through the gated MLPs that were chosen for it, and their sum.

On a GPU (`gpu/moe.py`) pairs of a token and an expert are sorted by expert, so that an expert's
weight is multiplied with all its tokens at once. Who chooses is `moe_routing.py`.

Legend: T tokens, k experts of a token, E experts held here, H hidden size, I inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.linear_quant import BLOCK, Fp8BlockWeight
from remora.kernels.quantise import GROUP, quantise_fp8_groups_reference

ExpertWeight = Tensor | Fp8BlockWeight


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    x:             [T, H] bfloat16, float16 or float32, each row in one piece
    ids:           [T, k] int32, no expert twice in a row
    weights:       [T, k] float32, multiplied once, with what an expert gives
    gate_up:       [E, 2 * I, H] of the type of `x`, gates first, or float8 in blocks
    down:          [E, H, I], likewise
    first_expert:  the id of the first expert held here; those of other ranks, and ids below 0, add
                   nothing, so that the sum over ranks is whole
    out:           [T, H], to be overwritten; None = new memory

    The sum is in float32 and in the order of a row's ids: its bits are the same each time.
    Between the products numbers are rounded to the type of `x`; for float8 they are quantised in
    groups of 128. On a GPU float8 needs tensor cores for it (sm_89 and newer; not gfx942).

    Returns `out`, in the dtype of `x`.
    Raises ValueError where shapes do not fit, NotImplementedError where a GPU has no float8.
    """
    experts, wide, hidden = values_of(gate_up).shape
    if values_of(down).shape != (experts, hidden, wide // 2) or x.shape[1] != hidden:
        raise ValueError(
            f"rows of {x.shape[1]}, gate_up {list(values_of(gate_up).shape)}"
            f" and down {list(values_of(down).shape)}"
        )
    if isinstance(gate_up, Fp8BlockWeight) and wide // 2 % BLOCK != 0:
        raise ValueError(f"an inner size of {wide // 2} in blocks of {BLOCK}")
    if out is None:
        out = torch.empty((len(x), hidden), dtype=x.dtype, device=x.device)
    if by_triton(x.device):
        from remora.kernels.gpu import moe as kernels

        kernels.moe(x, ids, weights, gate_up, down, first_expert, out)
        return out
    return out.copy_(moe_reference(x, ids, weights, gate_up, down, first_expert=first_expert))


def values_of(weight: ExpertWeight) -> Tensor:
    """Return the tensor of a weight's elements."""
    return weight.values if isinstance(weight, Fp8BlockWeight) else weight


def moe_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    first_expert: int = 0,
) -> Tensor:
    """`moe` in torch, with float32 sums."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(values_of(gate_up))):
        token, place = (ids == expert + first_expert).nonzero(as_tuple=True)
        gate, up = _multiply(x[token], gate_up, expert).chunk(2, dim=1)
        inner = (F.silu(gate) * up).to(x.dtype)
        given = _multiply(inner, down, expert).to(x.dtype).float()
        total.index_add_(0, token, given * weights[token, place][:, None])
    return total.to(x.dtype)


def _multiply(x: Tensor, weight: ExpertWeight, expert: int) -> Tensor:
    if isinstance(weight, Tensor):
        return x.float() @ weight[expert].float().T
    values, scales = quantise_fp8_groups_reference(x)
    rows = values.float() * scales.T.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    one = Fp8BlockWeight(values=weight.values[expert], scales=weight.scales[expert])
    return rows @ one.dequantised().T
