"""Converts a model's norms for step programs: float32 weights with scales folded in."""

from __future__ import annotations

from remora.engine.layers.attention import SelfAttention
from remora.engine.layers.head_norm import HeadsNorm
from remora.engine.layers.norm import LayerNorm, Norm, RMSNorm
from remora.kernels.cpu.norms import NormWeights


def of_rows(norm: Norm, *, residual_scale: float, factor: float = 1.0) -> NormWeights:
    """Return a norm of whole rows.

    residual_scale:  that the stored rows are divided by; only epsilon depends on it
    factor:          on the norm's output
    """
    return NormWeights(
        weight=norm.weight.float() * factor,
        bias=None if norm.bias is None else norm.bias.float() * factor,
        epsilon=norm.eps / residual_scale**2,
        is_centered=isinstance(norm, LayerNorm),
    )


def of_heads(attention: SelfAttention) -> tuple[NormWeights, NormWeights] | None:
    """Return the norms of all queries and of all keys of a token; None = there are none."""
    sizes = attention.num_heads, attention.num_kv_heads
    if attention.head_norms is not None:
        query, key = map(_of_each_head, attention.head_norms, sizes)
        return query, key
    if attention.other_norms is not None:
        query, key = map(_of_all_heads, attention.other_norms, sizes)
        return query, key
    return None


def _of_each_head(norm: RMSNorm, num_heads: int) -> NormWeights:
    weight = norm.weight.float()
    return NormWeights(weight=weight.repeat(num_heads), epsilon=norm.eps, span=len(weight))


def _of_all_heads(norm: HeadsNorm, num_heads: int) -> NormWeights:
    chosen, shape = norm.config, (num_heads, norm.head_dim)
    weight = norm.weight.float() + chosen.norm.offset
    return NormWeights(
        weight=weight.expand(shape).flatten(),
        bias=None if norm.bias is None else norm.bias.float().expand(shape).flatten(),
        epsilon=chosen.norm.eps,
        span=None if chosen.span == "all" else norm.head_dim,
        is_centered=chosen.norm.kind == "layer",
    )
