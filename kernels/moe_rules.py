"""How models with experts choose them, and what an expert's gates do: plain values, no tensors.

`moe_routing.py` and `moe.py` compute by them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a model chooses experts.

    top_k:          experts of a token
    is_sigmoid:     scores are sigmoids of logits, each for itself; else one softmax
    is_normalised:  the weights of a token are divided by their sum
    scaling:        what weights are multiplied with at the end
    num_groups:     into which the experts are divided, in order; experts come from the `top_groups`
                    best of them
    group_best:     a group is as good as the sum of this many of its best experts, 1 or 2
    """

    top_k: int
    is_sigmoid: bool = False
    is_normalised: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    def __post_init__(self) -> None:
        """Refuse what no kernel does."""
        if not 1 <= self.top_groups <= self.num_groups or self.group_best not in (1, 2):
            raise ValueError(f"no such choice of groups: {self}")

    def chooses_by_logits(self, *, has_bias: bool) -> bool:
        """Whether the order of logits decides, which is that of scores but for rounding."""
        return not has_bias and self.group_best == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """What gates let through: gate * sigmoid(sharpness * gate) * (up + offset).

    limit:  gates are cut off above it, ups above it and below its negative; None = nowhere
    """

    sharpness: float = 1.0
    offset: float = 0.0
    limit: float | None = None


SILU = Gating()
MIN_WEIGHT_SUM = 1e-20  # added to a token's sum of weights before dividing by it
