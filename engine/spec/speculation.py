"""Drafts for the sequences of a step: which sequences get how many, and how many were right.

Joins a proposer, which guesses tokens, and a controller, which says how many guesses pay. Whatever
they return, output is the same as without drafts (`acceptance.py`). Knows sequences; no pages, no
steps, no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

from remora.engine.scheduler.sequence import Sequence
from remora.engine.spec.controller import Controller
from remora.engine.spec.proposer import Proposer
from remora.engine.types import Request


def can_draft(request: Request) -> bool:
    """Return whether several tokens of a request can be sampled in one step.

    A logit processor or a constraint may keep state that one step advances by one token.
    """
    sampling = request.sampling
    return (
        sampling.custom_logit_processor is None
        and request.grammar is None
        and request.reasoning is None
        and request.healed_id is None
        and not sampling.allowed_token_ids
        and not sampling.first_token_ids
    )


class Speculation:
    """Drafts of all sequences of one scheduler.

    num_verified:   rows that had drafts, over all steps
    num_drafted:    their drafts
    num_accepted:   drafts that were right
    """

    def __init__(
        self,
        proposer: Proposer,
        controller: Controller,
        *,
        max_drafts: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        """Begin without sequences.

        max_drafts:  of a row in one step, whatever the controller says
        """
        self.num_verified = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._proposer = proposer
        self._controller = controller
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._begun: set[int] = set()

    def propose(
        self, decoding: SequenceABC[Sequence], room: int
    ) -> list[tuple[Sequence, list[int]]]:
        """Return drafts for sequences that decode in the next step; [] or shorter is allowed.

        room:  most drafts together
        """
        asked: list[tuple[Sequence, int]] = []
        for seq in decoding:
            if seq.num_output_tokens == 0 or not can_draft(seq.request):
                continue
            if seq.order not in self._begun:
                self._begun.add(seq.order)
                self._proposer.begin(seq.order, seq.token_ids)
            limit = min(
                self._max_drafts,
                self._controller.limit(seq.order, len(decoding)),
                seq.num_remaining - 1,  # one more token is sampled in any case
                room,
            )
            if limit > 0:
                asked.append((seq, limit))
                room -= limit
        proposed = self._proposer.propose([(seq.order, limit) for seq, limit in asked])
        drafts = [
            (seq, self._usable(seq, draft_ids[:limit]))
            for (seq, limit), draft_ids in zip(asked, proposed, strict=True)
        ]
        return [(seq, draft_ids) for seq, draft_ids in drafts if draft_ids]

    def observe(self, seq: Sequence, num_drafts: int, run: tuple[int, ...]) -> None:
        """Take in a step's new tokens of a sequence, `len(run) - 1` of which were drafts."""
        if num_drafts:
            self.num_verified += 1
            self.num_drafted += num_drafts
            self.num_accepted += len(run) - 1
        if seq.order in self._begun:
            self._controller.observe(seq.order, num_drafts, len(run) - 1)
            self._proposer.extend(seq.order, run)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of a step of `num_tokens` tokens, none of them of a prompt."""
        self._controller.observe_step(num_tokens, seconds)

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if seq.order in self._begun:
            self._begun.remove(seq.order)
            self._proposer.end(seq.order)
            self._controller.end(seq.order)

    def _usable(self, seq: Sequence, draft_ids: SequenceABC[int]) -> list[int]:
        """Cut drafts at the first that is no token, or that would end the sequence.

        The end is not worth a draft: it is the sequence's last token, drafted or not.
        """
        stops = seq.request.sampling.stop_token_ids
        usable: list[int] = []
        for token_id in draft_ids:
            if (
                not 0 <= token_id < self._vocab_size
                or token_id in stops
                or token_id in self._eos_token_ids
            ):
                break
            usable.append(int(token_id))
        return usable
