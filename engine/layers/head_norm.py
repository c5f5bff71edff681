"""QK norms that attention backends do not apply themselves: all but an RMS norm of each head with
one weight for all heads (Qwen3). Each rank holds its own heads' weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from remora.engine.models.config import HeadNorm
from remora.engine.parallel.group import Group
from remora.engine.parallel.shard import Axis, Shard


class HeadsNorm:
    """Norm of the heads of q or of k; over all ranks' heads if the span is `all`.

    weight, bias:  [held heads or 1, head_dim]
    """

    def __init__(
        self,
        config: HeadNorm,
        heads: Axis,
        head_dim: int,
        *,
        copies: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """Allocate the weights; `copies` is the number of ranks that hold the same heads."""
        self.config = config
        self.heads, self.head_dim, self.copies = heads, head_dim, copies
        shape = (1 if config.span == "head" else len(heads.held), head_dim)
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.bias = torch.empty(shape, dtype=dtype, device=device) if config.norm.bias else None

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        """Normalise [num_tokens, held heads, head_dim]."""
        norm = self.config.norm
        wide = x.float()
        if norm.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        squares = wide.square()
        if self.config.span == "all":
            total = group.all_reduce(squares.sum((-2, -1)).unsqueeze(1) / self.copies)
            mean = (total / (self.heads.size * self.head_dim)).unsqueeze(2)
        else:
            mean = squares.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(mean + norm.eps) * (self.weight.float() + norm.offset)
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)

    def tensors(self, name: str) -> Iterator[tuple[str, Shard]]:
        """Yield each checkpoint name and the shard of it that this rank holds."""
        for kind, memory in (("weight", self.weight), ("bias", self.bias)):
            if memory is None:
                continue
            if self.config.is_list:
                whole = (Axis.whole(self.head_dim),)
                for head, row in zip(self.heads.held, memory, strict=True):
                    yield f"{name}.norms.{head}.{kind}", Shard(memory=row, axes=whole)
            elif self.config.span == "each":
                both = (self.heads, Axis.whole(self.head_dim))
                yield f"{name}.{kind}", Shard(memory=memory, axes=both)
            else:
                heads = Axis.whole(1) if self.config.span == "head" else self.heads
                flat = (heads.times(self.head_dim),)
                yield f"{name}.{kind}", Shard(memory=memory.view(-1), axes=flat)
