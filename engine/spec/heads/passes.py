"""The seam between the drafting of heads and how a head computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from remora.engine.runner.inputs import Int64Array, StepInputs
from remora.engine.sampling.token_sampler import TokenSampler

States = Callable[[Int64Array], Tensor]
"""Returns a copy of the target's states [N, state_size] of tokens [N] of its latest step."""


class HeadPass(Protocol):
    """Computes a head's layer and logits.

    token_sampler:  for its logits
    draft_ids:      [draft vocabulary] the target's ids of its own, on the device of the logits;
                    None = they are the same
    """

    token_sampler: TokenSampler
    draft_ids: Tensor | None

    def run(self, inputs: StepInputs, states: Tensor, *, is_target: bool) -> tuple[Tensor, Tensor]:
        """Run the head; returns logits [R, vocabulary] and its states [R, H] to continue from.

        inputs:     IN_FLIGHT stands for the newest token of its row, where a `DraftChain` says so
        states:     [T, state_size] of the target, or [T, H] of the head itself
        Logits are valid until the next call.
        """

    def close(self) -> None:
        """Free what was captured; further calls do nothing."""
