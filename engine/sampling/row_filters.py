"""Filters of single rows that the drawing kernels do not have: locally typical, and infill.

A filter bans tokens of one row's logits after all edits. It applies the row's temperature, top-k,
top-p and min-p first, so the kernels only draw from what it leaves. Greedy rows have no filter.

Legend: V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from remora.engine.types import SamplingParams

# Candidates that the infill filter compares, the likeliest ones.
MAX_INFILL_CANDIDATES = 256
# The infill filter ends the output once its end is likelier than the text by this factor for each
# candidate, and drops text below this probability.
END_WEIGHT, LEAST_INFILL = 3.0, 0.2


class RowFilter:
    """The filter of one row.

    temperature:  of the row, above 0
    token_bytes:  the bytes of an id, for the infill filter
    end_ids:      that end the output
    """

    def __init__(
        self,
        sampling: SamplingParams,
        temperature: float,
        token_bytes: Callable[[int], bytes],
        end_ids: Sequence[int],
    ) -> None:
        self._sampling = sampling
        self._temperature = temperature
        self._token_bytes = token_bytes
        self._end_ids = frozenset(end_ids)

    def run(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that must not be drawn to -inf, in place."""
        sampling = self._sampling
        scaled = truncated(
            logits / self._temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        if sampling.typical_p < 1:
            scaled = scaled.masked_fill(~typical(scaled, sampling.typical_p), -torch.inf)
        is_good = logits.amax().isfinite()  # else no token is drawn, and the fault must be found
        stays = self._infill(scaled) if sampling.infill and is_good else scaled > -torch.inf
        logits.masked_fill_(is_good & ~stays, -torch.inf)

    def _infill(self, scaled: Tensor) -> Tensor:
        """Return which tokens stay [V]: ends, or the text that is likely when beginnings count.

        The probability of a token counts for all that it begins, or that begin it, whichever of
        the two is likelier.
        """
        size = min(MAX_INFILL_CANDIDATES, len(scaled))
        values, ids = scaled.softmax(0).topk(size)
        shares = {id_: share for id_, share in zip(ids.tolist(), values.tolist(), strict=True)
                  if share > 0}  # fmt: skip
        ends = [id_ for id_ in shares if id_ in self._end_ids]
        texts = {id_: share for id_, share in shares.items() if id_ not in self._end_ids}
        ending = sum(shares[id_] for id_ in ends)
        if not texts or END_WEIGHT * ending * len(shares) > sum(texts.values()):
            kept = ends
        else:
            merged = self._merged(texts)
            kept = [id_ for id_, share in merged.items() if share >= LEAST_INFILL]
            kept = [*(kept or ends or [max(merged, key=lambda id_: merged[id_])])]
            least = sum(merged[id_] for id_ in kept if id_ in merged) / (len(kept) + 1)
            kept = [id_ for id_ in kept if merged.get(id_, least) >= least]
        stays = torch.zeros(len(scaled), dtype=torch.bool, device=scaled.device)
        stays[torch.tensor(kept, device=scaled.device)] = True
        return stays

    def _merged(self, shares: dict[int, float]) -> dict[int, float]:
        """Return the shares of texts, those of one's beginnings added to the likelier one."""
        merged, pieces = dict(shares), {id_: self._token_bytes(id_) for id_ in shares}
        for one in shares:
            for other in shares:
                is_beginning = one != other and pieces[other].startswith(pieces[one])
                if is_beginning and one in merged and other in merged:
                    into, gone = (one, other) if merged[one] >= merged[other] else (other, one)
                    merged[into] += merged.pop(gone)
        return merged


def truncated(scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return scaled logits [V] with -inf outside top-k, then top-p, then min-p.

    As `kernels.sampling.draw_truncated`: equals of the last one stay.
    """
    ordered = scaled.sort(descending=True).values
    least = ordered[min(top_k, len(ordered)) - 1 if top_k else -1]
    if top_p < 1:
        weights = (ordered - ordered[0]).double().exp()
        running = torch.where(ordered >= least, weights, 0.0).cumsum(0)
        num_short = (running < top_p * running[-1]).sum().clamp(max=len(ordered) - 1)
        least = torch.maximum(least, ordered[num_short])
    if min_p > 0:
        least = torch.maximum(least, ordered[0] + torch.tensor(min_p).log().item())
    return scaled.masked_fill(scaled < least, -torch.inf)


def typical(scaled: Tensor, mass: float) -> Tensor:
    """Return which tokens [V] stay in locally typical sampling (Meister et al., 2022).

    These are the tokens whose surprise is nearest to the expected one, with this share of the mass;
    equals of the last one stay.
    """
    logprobs = scaled.double().log_softmax(0)
    shares = logprobs.exp()
    entropy = -(shares * logprobs).nansum()
    distances = (-logprobs - entropy).abs()
    ordered, places = distances.sort(stable=True)
    num_short = (shares[places].cumsum(0) < mass).sum().clamp(max=len(ordered) - 1)
    return distances <= ordered[num_short]
