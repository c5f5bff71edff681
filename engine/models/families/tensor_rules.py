"""Builds the `TensorRule`s of checkpoints with other tensor names or fused tensors.

Rows of a tensor are its outputs. Splits are views, for weights and biases alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from remora.engine.models.config import AttentionConfig, TensorRule

if TYPE_CHECKING:  # configs are also read where nothing computes
    from torch import Tensor

Split = Callable[["Tensor"], "tuple[Tensor, ...]"]
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
OURS = r"model.layers.\1."


def of_layers(
    prefix: str,
    names: Mapping[str, str | tuple[str, ...]],
    split: Split | None = None,
    *,
    is_transposed: bool = False,
) -> Iterator[TensorRule]:
    """Yield rules for modules of layers.

    prefix:         regular expression of what precedes a layer's number
    names:          the model's names, one or several, by the checkpoint's
    split, is_transposed:  as in TensorRule
    """
    for theirs, ours in names.items():
        parts = (ours,) if isinstance(ours, str) else ours
        pattern = rf"{prefix}(\d+)\.{re.escape(theirs)}\.(weight|bias)"
        yield TensorRule(
            pattern, tuple(rf"{OURS}{part}.\2" for part in parts), split, is_transposed
        )


def of_ends(names: Mapping[str, str]) -> Iterator[TensorRule]:
    """Yield rules for modules outside of layers: the model's names by patterns."""
    for theirs, ours in names.items():
        yield TensorRule(rf"{theirs}\.(weight|bias)", (rf"{ours}.\1",))


def unused(*patterns: str) -> Iterator[TensorRule]:
    """Yield rules for tensors that the model does not use."""
    for pattern in patterns:
        yield TensorRule(pattern, ())


def blocks(*sizes: int) -> Split:
    """Return a split of rows into consecutive blocks."""
    return lambda whole: tuple(whole.split_with_sizes(sizes))


def qkv_blocks(shape: AttentionConfig) -> Split:
    """Return a split of rows into all heads of q, of k and of v."""
    key = shape.num_kv_heads * shape.head_dim
    return blocks(shape.num_heads * shape.head_dim, key, key)


def qkv_groups(shape: AttentionConfig) -> Split:
    """Return a split of rows that are grouped by KV head: its heads of q, its k, its v."""
    group = shape.num_heads // shape.num_kv_heads

    def split(whole: Tensor) -> tuple[Tensor, ...]:
        rest = whole.shape[1:]
        heads = whole.reshape(shape.num_kv_heads, group + 2, shape.head_dim, *rest)
        parts = (heads[:, :group], heads[:, group], heads[:, group + 1])
        return tuple(part.reshape(-1, *rest) for part in parts)

    return split


def unit_rows(whole: Tensor) -> tuple[Tensor, ...]:
    """Divide each row by its length."""
    return (whole / whole.norm(dim=-1, keepdim=True).clamp(min=1e-12),)
