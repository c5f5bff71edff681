"""Parameters of expert routing (`moe_routing.py`) and of experts' gates (`moe.py`).

Plain values, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routing rule of a model.

    top_k:          experts of a token
    is_sigmoid:     scores are sigmoids of the logits; otherwise their softmax
    is_normalised:  the weights of a token are divided by their sum
    scaling:        final factor of the weights
    num_groups:     groups of consecutive experts; experts are chosen from the `top_groups` best
    group_best:     a group's score is the sum of this many of its best experts, 1 or 2
    """

    top_k: int
    is_sigmoid: bool = False
    is_normalised: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1

    def __post_init__(self) -> None:
        """Reject values that no kernel supports."""
        if not 1 <= self.top_groups <= self.num_groups or self.group_best not in (1, 2):
            raise ValueError(
                f"unsupported groups: {self}; 1 <= top_groups <= num_groups, group_best 1 or 2"
            )

    def chooses_by_logits(self, *, has_bias: bool) -> bool:
        """Return whether logits, whose order equals that of scores up to rounding, decide."""
        return not has_bias and self.group_best == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """Gate of an expert: gate * sigmoid(sharpness * gate) * (up + offset).

    limit:  upper bound of gates, and bound of the magnitude of ups; None = no bound
    """

    sharpness: float = 1.0
    offset: float = 0.0
    limit: float | None = None


SILU = Gating()
MIN_WEIGHT_SUM = 1e-20  # added to a token's sum of weights before dividing by it
