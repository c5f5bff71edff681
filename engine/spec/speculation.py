"""Drafts for the sequences of a step: which sequences get how many, and how many were right.

Joins a proposer, which guesses tokens, and a controller, which says how many guesses pay. Whatever
they return, output is the same as without drafts (`acceptance.py`). Knows sequences; no pages, no
steps, no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC

from remora.configs.errors import InvariantViolated
from remora.engine.scheduler.sequence import Sequence
from remora.engine.spec.controller import Controller
from remora.engine.spec.counts import NONE_VERIFIED, DraftCounts
from remora.engine.spec.drafter import PENDING
from remora.engine.spec.prediction import PredictionProposer
from remora.engine.spec.proposer import Proposer
from remora.engine.types import Request

# Of (row, drafts) each: how many of the drafts, from the first on, the row's constraint lets come.
PossibleDrafts = Callable[[SequenceABC[tuple[int, SequenceABC[int]]]], list[int]]


PREDICTION = "prediction"  # source of the drafts that requests bring


def can_draft(request: Request) -> bool:
    """Return whether several tokens of a request can be sampled in one step.

    A logit processor is the operator's code, which may keep state that cannot go back. Beams are
    chosen together, one token at a time. What drafts knows no embeddings.
    """
    sampling = request.sampling
    is_plain = sampling.custom_logit_processor is None and sampling.beams is None
    return is_plain and request.embeddings is None


class Speculation:
    """Drafts of all sequences of one scheduler.

    by_source:       drafts of PREDICTION and of `source`, over all steps
    tried_at:        [max_drafts] by position in their row: drafts whose predecessors were right
    right_at:        [max_drafts] how many of them were right, too
    draft_s:         seconds that drafting took, without proposers that look tokens up
    num_verify_steps, verify_s:  steps in which a row had drafts, and the seconds of their forward
                     passes and sampling, all tokens included
    """

    def __init__(
        self,
        proposer: Proposer,
        controller: Controller,
        *,
        source: str,
        max_drafts: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_tokens: int | None = None,
        possible_drafts: PossibleDrafts | None = None,
    ) -> None:
        """Begin without sequences.

        source:           name of the proposer, for statistics
        max_drafts:       of a row in one step, whatever the controller says
        max_tokens:       longest sequence that has drafts, these included; None = any
        possible_drafts:  spares steps drafts that constraints exclude; None = these are refused
        """
        self.by_source = {PREDICTION: NONE_VERIFIED, source: NONE_VERIFIED}
        self.tried_at, self.right_at = [0] * max_drafts, [0] * max_drafts
        self.draft_s = self.verify_s = 0.0
        self.num_verify_steps = 0
        self._source = source
        self._proposer = PredictionProposer(proposer)
        self._controller = controller
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._possible_drafts = possible_drafts
        self._begun: set[int] = set()
        self._drafting: set[int] = set()  # sequences whose latest step had unpredicted drafts
        self._most_drafts = 0  # unpredicted ones of a row in this step
        self._has_begun_drafting = False  # whether one of them is new in this step

    @property
    def counts(self) -> DraftCounts:
        """Drafts of all sources."""
        return DraftCounts(*map(sum, zip(*self.by_source.values(), strict=True)))

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
                self._begin(seq)
            limit = min(
                self._max_drafts,
                self._controller.limit(
                    seq.order, len(decoding), is_free=self._proposer.expects(seq.order)
                ),
                seq.num_remaining - 1,  # one more token is sampled in any case
                room,
            )
            if seq.request.sampling.max_drafts is not None:
                limit = min(limit, seq.request.sampling.max_drafts)
            if self._max_tokens is not None:
                limit = min(limit, self._max_tokens - seq.num_tokens)
            if limit > 0:
                asked.append((seq, limit))
                room -= limit
        proposed = self._proposer.propose([(seq.order, limit) for seq, limit in asked])
        drafts = [
            (seq, self._usable(seq, draft_ids[:limit]))
            for (seq, limit), draft_ids in zip(asked, proposed, strict=True)
        ]
        self._cut_impossible(drafts)
        return [(seq, draft_ids) for seq, draft_ids in drafts if draft_ids]

    def _cut_impossible(self, drafts: list[tuple[Sequence, list[int]]]) -> None:
        """Remove known drafts that constraints exclude."""
        known = [pair for pair in drafts if pair[1] and pair[1][0] != PENDING]
        if self._possible_drafts is None or not known:
            return
        counts = self._possible_drafts([(_row_of(seq), draft_ids) for seq, draft_ids in known])
        for (_, draft_ids), count in zip(known, counts, strict=True):
            del draft_ids[count:]

    def _begin(self, seq: Sequence) -> None:
        self._proposer.begin(seq.order, seq.token_ids, seq.request.namespace)
        if predicted := seq.request.prediction_ids:
            output_ids = seq.token_ids[seq.num_prompt_tokens :]
            self._proposer.predict(seq.order, predicted, output_ids)

    def observe(self, seq: Sequence, num_drafts: int, run: tuple[int, ...]) -> None:
        """Take in a step's new tokens of a sequence, `len(run) - 1` of which were drafts."""
        num_right = len(run) - 1
        is_predicted = bool(num_drafts) and seq.order in self._proposer.predicted
        if num_drafts:
            source = PREDICTION if is_predicted else self._source
            self.by_source[source] = self.by_source[source].with_row(num_drafts, num_right)
            seq.drafts = seq.drafts.with_row(num_drafts, num_right)
            if is_predicted:
                right, wrong = seq.predicted
                seq.predicted = right + num_right, wrong + num_drafts - num_right
            for position in range(min(num_drafts, num_right + 1)):
                self.tried_at[position] += 1
                self.right_at[position] += position < num_right
        if num_drafts and not is_predicted:
            self._most_drafts = max(self._most_drafts, num_drafts)
            self._has_begun_drafting |= seq.order not in self._drafting
            self._drafting.add(seq.order)
        else:
            self._drafting.discard(seq.order)
        if seq.order in self._begun:
            self._controller.observe(seq.order, num_drafts, num_right, is_predicted=is_predicted)
            self._proposer.extend(seq.order, run)

    def observe_step(
        self, num_tokens: int, seconds: float, *, num_drafts: int, draft_s: float, pure: bool
    ) -> None:
        """Take in the time of a step, after its sequences were observed.

        num_tokens:  that it computed, `num_drafts` of them drafts
        draft_s:     to make its drafts, in addition to `seconds`
        pure:        whether it computed no prompt
        """
        if num_drafts:
            self.num_verify_steps += 1
            self.verify_s += seconds
        if pure:
            self._controller.observe_step(num_tokens, seconds)
        self.draft_s += draft_s
        # A row's first drafts include what it missed while it had none, which others do not.
        if draft_s and self._most_drafts and not self._has_begun_drafting:
            self._controller.observe_drafting(self._most_drafts, draft_s)
        self._most_drafts, self._has_begun_drafting = 0, False

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if seq.order in self._begun:
            self._begun.remove(seq.order)
            self._drafting.discard(seq.order)
            self._proposer.end(seq.order)
            self._controller.end(seq.order)

    def _usable(self, seq: Sequence, draft_ids: SequenceABC[int]) -> list[int]:
        """Cut drafts at the first that is no token, or that would end the sequence.

        The end is not worth a draft: it is the sequence's last token, drafted or not.
        """
        stops = seq.request.sampling.stop_token_ids
        usable: list[int] = []
        for token_id in draft_ids:
            if token_id != PENDING and (
                not 0 <= token_id < self._vocab_size
                or token_id in stops
                or token_id in self._eos_token_ids
            ):
                break
            usable.append(int(token_id))
        return usable


def _row_of(seq: Sequence) -> int:
    if seq.row is None:
        raise InvariantViolated(f"{seq.request.request_id} decodes without a row")
    return seq.row
