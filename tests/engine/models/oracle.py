"""transformers as the judge of what the engine generates.

Greedy output is right if, at every position, the token is the one transformers ranks first given
the same prefix. One forward pass over prompt and output shows all positions at once, and by
induction this says the same as comparing with `generate`. Where the two best logits are within
TIE of each other, either token is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

TIE = 1e-5


class Oracle:
    """A checkpoint loaded by transformers, in float32, or a model of transformers.

    stepwise:  feed one token at a time, where the angles of a position depend on how many tokens
               come at once (dynamic rope)
    """

    def __init__(self, model: Path | Any, *, stepwise: bool = False) -> None:
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model = model
        self._stepwise = stepwise

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], start: int = 0) -> Tensor:
        """Return float32 logits [len - start, vocab] that follow each token from `start` on."""
        if self._stepwise:
            return self._step_through(token_ids)[start:]
        keep = len(token_ids) - start
        result: Tensor = self._model(torch.tensor([list(token_ids)]), logits_to_keep=keep).logits[0]
        return result

    def _step_through(self, token_ids: Sequence[int]) -> Tensor:
        cache = None
        rows = []
        for token in token_ids:
            answer = self._model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            rows.append(answer.logits[0, -1])
        return torch.stack(rows)

    def logprobs(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Return log-probabilities [len - start] of the tokens from `start` (>= 1) on."""
        rows = self.logits(token_ids[:-1], start - 1).log_softmax(-1)
        return rows.gather(1, torch.tensor(token_ids[start:])[:, None])[:, 0]

    def assert_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Fail unless every output token is the likeliest one, ties aside."""
        rows = self.logits([*prompt, *output[:-1]], len(prompt) - 1)
        best, likeliest = rows.max(-1)
        chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        wrong = (best - chosen > TIE).nonzero().flatten().tolist()
        assert not wrong, (
            f"token {wrong[0]} of the output is {output[wrong[0]]};"
            f" transformers says {likeliest[wrong[0]].item()}"
        )

    def assert_same(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> None:
        """Fail unless two greedy outputs are equal, or part where the two best logits tie."""
        if list(one) == list(other):
            return
        split = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        row = self.logits([*prompt, *one[:split]], len(prompt) + split - 1)[-1]
        gap = (row.max() - row[[one[split], other[split]]].min()).item()
        assert gap <= TIE, f"outputs part at token {split} with a gap of {gap:.2e} in the logits"
