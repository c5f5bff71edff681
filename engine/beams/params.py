"""Parameters of a beam search and their limits. No sequences, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from remora.configs.errors import InvalidSampling

MAX_BEAMS = 32
MAX_LENGTH_PENALTY = 10.0
MAX_DIVERSITY_PENALTY = 100.0

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How a beam search ranks and ends. Immutable and validated on construction.

    A finished output's score is the sum of its tokens' log-probabilities, divided by its number of
    tokens to the power of `length_penalty`.

    width:             beams together
    length_penalty:    0 = scores are sums; above 0 favours long outputs, below 0 short ones
    early_stopping:    True = end as soon as `width` outputs have finished; False = end when the
                       best beam, scored at its present length, is worse than all of them;
                       "never" = likewise, scored at the length that suits it best
    num_groups:        groups of equal size that search one after the other in each step
    diversity_penalty: subtracted from a token's log-probability for each time that earlier groups
                       have chosen it in the same step

    Raises InvalidSampling, which names the field.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_groups: int = 1
    diversity_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("num_beams", self.width, 1, MAX_BEAMS),
            ("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
            ("num_beam_groups", self.num_groups, 1, MAX_BEAMS),
            ("diversity_penalty", self.diversity_penalty, 0.0, MAX_DIVERSITY_PENALTY),
        ):
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidSampling(
                    f"{name} is {value}; it must lie between {low} and {high}.", name
                )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidSampling(
                f'early_stopping is {self.early_stopping!r}; use true, false or "never".',
                "early_stopping",
            )
        if self.width % self.num_groups:
            raise InvalidSampling(
                f"num_beam_groups is {self.num_groups}; it must divide the {self.width} beams.",
                "num_beam_groups",
            )
        if self.diversity_penalty and self.num_groups == 1:
            raise InvalidSampling(
                "diversity_penalty needs num_beam_groups of 2 or more.", "diversity_penalty"
            )

    @property
    def group_width(self) -> int:
        """Beams of each group."""
        return self.width // self.num_groups

    def num_kept(self, num_stops: int) -> int:
        """Return how many continuations of a group a step keeps.

        Enough that beams remain if every stop token of every beam is among them.
        """
        return max(2, 1 + num_stops) * self.group_width

    def num_candidates(self, num_stops: int) -> int:
        """Return how many tokens of a beam a step may need.

        Earlier groups' tokens may fall behind by the penalty.
        """
        return self.num_kept(num_stops) + self.width - self.group_width
