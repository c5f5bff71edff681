"""AWQ (arXiv:2306.00978): scales up the inputs that matter before a weight is rounded.

A weight's inputs are multiplied by factors, and what makes these inputs is divided by them: a norm,
or the linear before. A factor is a power of the input's root mean square; the exponent, one for
each linear, is the best of a few. Knows no files.

Legend: O outputs, I inputs, F factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.experts import Experts
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.layers.norm import Norm
from remora.engine.models.decoder import DecoderBlock
from remora.engine.quantise.gptq import loss
from remora.engine.quantise.search import FULL_RANGE, Scheme, round_to_grid, search_grid

EXPONENTS = tuple(step / 20 for step in range(20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A linear whose inputs can be scaled.

    linear:  the linear
    spread:  from factors [F] to factors of its inputs [I]
    pool:    from mean squares of its inputs [I] to [F]
    divide:  divides what makes the inputs by factors [F]; returns the factors that it divided by,
             which may differ by rounding
    """

    linear: Linear
    spread: Callable[[Tensor], Tensor]
    pool: Callable[[Tensor], Tensor]
    divide: Callable[[Tensor], Tensor]


def scale_inputs(fold: Fold, gram: Tensor, scheme: Scheme) -> None:
    """Choose factors for a linear's inputs, and fold them into its weight and what is before it.

    gram:  X^T X / T [I, I] of the inputs
    """
    weight = fold.linear.weight
    square = fold.pool(gram.diagonal()).clamp(min=torch.finfo(torch.float32).tiny)
    best, chosen = float("inf"), torch.ones_like(square)
    for exponent in EXPONENTS:
        factors = square.pow(exponent / 2)
        factors /= (factors.max() * factors.min()).sqrt()
        spread = fold.spread(factors)
        scaled, inside = weight * spread, gram / spread / spread[:, None]
        rounded = round_to_grid(scaled, search_grid(scaled, scheme, ranges=FULL_RANGE), scheme)
        lost = float(loss(scaled, rounded, inside).sum())
        if lost < best:
            best, chosen = lost, factors
    weight *= fold.spread(fold.divide(chosen))


def folds(block: DecoderBlock, norm_dtype: torch.dtype) -> Iterator[Fold]:
    """Yield the linears of a block whose inputs can be scaled, in the order of computing.

    norm_dtype:  in which weights of norms are stored
    A norm that two linears read is left as it is, and so is a router's.
    """
    is_shared = block.config.parallel and block.mlp_norm is None
    first = block.attention.linears()[0]
    if block.attention_norm is not None and not is_shared:
        yield _after_norm(first, block.attention_norm, norm_dtype)
    if isinstance(block.attention, SelfAttention):
        yield _after_values(block.attention)
    if isinstance(block.mlp, Experts):
        if block.mlp.shared is not None:
            yield from _after_up(block.mlp.shared)
        return
    if block.mlp_norm is not None:
        yield _after_norm(block.mlp.gate_up_proj, block.mlp_norm, norm_dtype)
    yield from _after_up(block.mlp)


def _same(factors: Tensor) -> Tensor:
    return factors


def _after_norm(linear: Linear, norm: Norm, dtype: torch.dtype) -> Fold:
    offset = getattr(norm, "offset", 0.0)

    def divide(factors: Tensor) -> Tensor:
        # What is stored is rounded, and the weight makes up for that.
        kept = (norm.weight / factors - offset).to(dtype).float() + offset
        exact = norm.weight / kept
        can_divide = exact.isfinite() & (exact > 0)
        exact = torch.where(can_divide, exact, 1.0)
        norm.weight.copy_(torch.where(can_divide, kept, norm.weight))
        if norm.bias is not None:
            norm.bias.div_(exact)
        return exact

    return Fold(linear=linear, spread=_same, pool=_same, divide=divide)


def _after_values(attention: SelfAttention) -> Fold:
    """Scale the inputs of o_proj; the query heads of a KV head share its factors."""
    heads, size = attention.num_kv_heads, attention.head_dim
    group = attention.num_heads // heads

    def spread(factors: Tensor) -> Tensor:
        return factors.view(heads, 1, size).expand(-1, group, -1).flatten()

    def pool(square: Tensor) -> Tensor:
        return square.view(heads, group, size).mean(1).flatten()

    return Fold(
        linear=attention.o_proj,
        spread=spread,
        pool=pool,
        divide=lambda factors: _divide_rows(attention.qkv_proj, factors),
    )


def _after_up(mlp: MLP) -> Iterator[Fold]:
    """Scale the inputs of down_proj, which are products with up_proj's outputs."""
    if mlp.scales_with_up:
        yield Fold(
            linear=mlp.down_proj,
            spread=_same,
            pool=_same,
            divide=lambda factors: _divide_rows(mlp.gate_up_proj, factors),
        )


def _divide_rows(linear: Linear, factors: Tensor) -> Tensor:
    """Divide the last outputs of a linear by factors."""
    linear.weight[-len(factors) :] /= factors[:, None]
    if linear.bias is not None:
        linear.bias[-len(factors) :] /= factors
    return factors
