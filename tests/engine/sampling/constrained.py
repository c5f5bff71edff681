"""Constraints, a vocabulary and a model small enough to see through, and an engine on them.

The vocabulary: 0 is the end of sequence, 1 the control token <end>, 2 to 9 spell parts of that
mark, and from 10 on come the letters a to z, then some longer texts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remora.engine.launch import make_table
from remora.engine.runner.inputs import StepInputs
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.tokens.token_text import Spellings
from remora.engine.types import MaskWords, ReasoningBudget, Request, SamplingParams, SequenceOutput
from tests.engine.fakes import make_plan
from tests.engine.scheduler.scheduled import Harness
from tests.engine.spec.proposers import Guess, make_speculation

EOS, MARK = 0, 1
TEXTS = (
    *("", "<end>", "<e", "nd>", "<", "end", ">", "nd>\n", "nd>abc", "nd>?"),
    *(chr(ord("a") + place) for place in range(26)),
    *("ab", "abc", "the", "then", "there", "th", " ", "\n", "?", "!", "é", "zz", "<en", "d>"),
)
VOCAB = len(TEXTS)
SPELLINGS = Spellings(VOCAB, lambda token_id: TEXTS[token_id].encode(), frozenset({EOS, MARK}))


def ids(*texts: str) -> list[int]:
    """The ids of these tokens."""
    return [TEXTS.index(text) for text in texts]


@dataclass(frozen=True)
class ToyGrammar:
    """One of these letters, then one of those, and so on.

    loops:  the last set may come again and again, so only the end of sequence ends the output
    """

    steps: tuple[str, ...]
    loops: bool = False
    num_bytes: int = 0

    def matcher(self) -> ToyMatcher:
        return ToyMatcher(self)

    def accepts(self, text: str) -> bool:
        """Whether the whole text is in the grammar."""
        sets = [self.at(place) for place in range(len(text))]
        long_enough = len(text) >= len(self.steps)
        return long_enough and all(char in here for char, here in zip(text, sets, strict=True))

    def at(self, place: int) -> str:
        """The letters that may stand at a place."""
        if place < len(self.steps):
            return self.steps[place]
        return self.steps[-1] if self.loops else ""


class ToyMatcher:
    def __init__(self, grammar: ToyGrammar) -> None:
        self._grammar, self._text = grammar, ""

    @property
    def is_complete(self) -> bool:
        return not self._grammar.at(len(self._text))

    def fill(self, words: MaskWords) -> None:
        allowed = [i for i in range(VOCAB) if i > MARK and self._fits(self._text + TEXTS[i])]
        if len(self._text) >= len(self._grammar.steps):
            allowed.append(EOS)
        for place in range(len(words)):
            bits = sum(1 << i % 32 for i in allowed if i // 32 == place)
            words[place] = np.uint32(bits).astype(np.int32)

    def accept(self, token_id: int) -> bool:
        if not TEXTS[token_id] or not self._fits(self._text + TEXTS[token_id]):
            return False
        self._text += TEXTS[token_id]
        return True

    def save(self) -> object:
        return self._text

    def restore(self, position: object) -> None:
        self._text = str(position)

    def _fits(self, text: str) -> bool:
        return all(char in self._grammar.at(place) for place, char in enumerate(text))


class BrokenGrammar:
    """A grammar and its matcher, which fails after as many tokens as wanted, as foreign code."""

    num_bytes = 0
    is_complete = False

    def __init__(self, after: int) -> None:
        self._after = after

    def matcher(self) -> BrokenGrammar:
        return BrokenGrammar(self._after)

    def fill(self, words: MaskWords) -> None:
        if self._after == 0:
            raise RuntimeError("boom")
        words.fill(-1)

    def accept(self, token_id: int) -> bool:
        self._after -= 1
        return True


class MarkovForward:
    """A ForwardPass whose logits depend on the last token and its position."""

    def forward(self, inputs: StepInputs) -> Tensor:
        rows = [
            np.random.default_rng(int(inputs.token_ids[at]) * 1009 + int(inputs.positions[at]))
            .normal(size=VOCAB)
            .astype(np.float32)
            for at in inputs.logit_index.tolist()
        ]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, VOCAB), np.float32))

    def logits(self, first: int, last: int) -> Tensor:
        raise NotImplementedError

    def hidden(self, first: int, last: int) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        pass


class ConstrainedEngine(Harness):
    """An engine on the model above, and what came out of it per sequence.

    guess:  what drafts; None = nothing does
    """

    def __init__(self, guess: Guess | None = None, **changes: object) -> None:
        self.logprobs: dict[tuple[str, int], list[float]] = defaultdict(list)
        plan = make_plan(**changes)
        sampler = Sampler(
            max_rows=plan.max_running_requests,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            spellings=SPELLINGS,
        )
        runner = LocalRunner(MarkovForward(), sampler, make_table(plan))
        speculation = None
        if guess is not None:
            speculation = make_speculation(
                guess, vocab_size=VOCAB, possible_drafts=runner.possible_drafts
            )
        super().__init__(made=plan, runner=runner, speculation=speculation)

    def run(self, max_steps: int = 3000) -> None:
        try:
            super().run(max_steps)
        finally:
            self.engine.close()

    def take(self, outputs: list[SequenceOutput]) -> None:
        super().take(outputs)
        for output in outputs:
            if output.logprobs is not None:
                self.logprobs[output.request_id, output.index] += output.logprobs.logprobs.tolist()

    def text(self, name: str, index: int = 0) -> str:
        return "".join(TEXTS[token_id] for token_id in self.tokens[name, index])


def make_request(
    name: str,
    *,
    prompt: list[int] | None = None,
    grammar: Any = None,
    budget: int | None = None,
    thinks: bool = False,
    heal: bool = False,
    **sampling: Any,
) -> Request:
    """A request for that model; `budget` or `thinks` make it begin within a thought."""
    return Request(
        request_id=name,
        prompt_ids=prompt or ids("a", "b", "c"),
        sampling=SamplingParams(**({"max_tokens": 30, "seed": 1} | sampling)),
        grammar=grammar,
        reasoning=ReasoningBudget(end="<end>", end_ids=tuple(ids("<e", "nd>")), budget=budget)
        if thinks or budget is not None
        else None,
        heal=heal,
    )
