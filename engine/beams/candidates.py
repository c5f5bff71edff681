"""Finds the likeliest next tokens of beams from their logits.

Beams are scored by log-probabilities of the raw logits, which masks, bias, penalties and bans then
change. Knows lines of logits; no rows or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.engine.sampling.token_sampler import SamplingKernels, describe
from remora.engine.types import Candidates, LogprobRows


@dataclass(frozen=True, slots=True)
class BeamLine:
    """A line of logits of a beam.

    num_candidates:  how many tokens are wanted
    num_logprobs:    likeliest tokens to report of the raw distribution; None = no log-probabilities
    """

    line: int
    num_candidates: int
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class BeamLogits:
    """Lines of beams during a step's sampling, perhaps on a device.

    raw:  [lines that report log-probabilities, V] before any change; None = no line does
    """

    lines: Sequence[BeamLine]
    index: Tensor
    raw: Tensor | None

    @classmethod
    def begin(cls, logits: Tensor, lines: Sequence[BeamLine]) -> BeamLogits:
        """Replace lines of raw logits [R, V] by log-probabilities, in place."""
        index = torch.tensor([each.line for each in lines], device=logits.device)
        scores = torch.log_softmax(logits.index_select(0, index), dim=-1)
        logits.index_copy_(0, index, scores)
        described = [place for place, each in enumerate(lines) if each.num_logprobs is not None]
        return cls(lines, index, scores[described] if described else None)

    def find(self, logits: Tensor) -> FoundCandidates:
        """Find the best tokens of the lines [R, V], which have been changed meanwhile."""
        most = min(max(each.num_candidates for each in self.lines), logits.shape[1])
        scores, token_ids = torch.topk(logits.index_select(0, self.index), most, dim=-1)
        return FoundCandidates(self, token_ids, scores)


@dataclass(frozen=True, slots=True)
class FoundCandidates:
    """Candidates [n, most] of each line, perhaps still on a device."""

    of: BeamLogits
    token_ids: Tensor
    scores: Tensor

    def take(self, kernels: SamplingKernels) -> dict[int, Candidates]:
        """Wait, and return the candidates of each line; excluded tokens are none."""
        token_ids, scores = self.token_ids.cpu().numpy(), self.scores.float().cpu().numpy()
        taken: dict[int, Candidates] = {}
        num_described = 0
        for place, each in enumerate(self.of.lines):
            count = min(each.num_candidates, int((scores[place] > -torch.inf).sum()))
            found = token_ids[place, :count].copy()
            logprobs: LogprobRows | None = None
            if each.num_logprobs is not None and self.of.raw is not None:
                raw = self.of.raw[num_described].expand(count, -1).contiguous()
                num_described += 1
                if count:
                    logprobs = describe(raw, found, each.num_logprobs, kernels)
            taken[each.line] = Candidates(
                token_ids=found, scores=scores[place, :count].copy(), logprobs=logprobs
            )
        return taken
