"""A step while it is planned: the tokens of each sequence, and the changes for the ranks.

A planned sequence can still be preempted before the step is complete. Knows nothing of scheduling
policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC

import numpy as np

from remora.configs.errors import InvariantViolated
from remora.engine.beams.moves import BeamMoves
from remora.engine.embeddings import EmbeddedTokens
from remora.engine.scheduler.sequence import Sequence
from remora.engine.types import (
    NO_DRAFTS,
    NO_TOKENS,
    IntArray,
    RowInit,
    SlotLoad,
    StepPlan,
    TokenArray,
)


class PlanBuilder:
    """Collects a StepPlan under a budget of tokens.

    max_prompt_tokens, max_prompts:  of prompts in the step; None = only the budget counts
    max_scored_tokens:  of prompts whose log-probabilities are computed; None = as for others
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        max_prompt_tokens: int | None = None,
        max_prompts: int | None = None,
        max_scored_tokens: int | None = None,
    ) -> None:
        self.budget = max_tokens
        self._prompt_budget = max_tokens if max_prompt_tokens is None else max_prompt_tokens
        self._max_prompts = max_tokens if max_prompts is None else max_prompts
        self._scored_budget = max_scored_tokens
        self._prompts: set[Sequence] = set()
        self._started: dict[Sequence, list[int]] = {}
        self._pages: dict[Sequence, list[int]] = {}
        self._counts: dict[Sequence, int] = {}
        self._drafts: dict[Sequence, SequenceABC[int]] = {}
        self._loads: dict[int, int] = {}
        self._moves: BeamMoves | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the step computes anything."""
        return bool(self._counts)

    def prompt_room(self, seq: Sequence | None = None, *, whole: bool = False) -> int:
        """Return the tokens left for one more prompt; with `whole`, the first may take all.

        seq:  whose prompt it is; None = one that is not scored
        """
        if len(self._prompts) >= self._max_prompts:
            return 0
        if whole and not self._prompts:
            return self.budget
        room = min(self.budget, self._prompt_budget)
        if self._scored_budget is not None and seq is not None and seq.wants_prompt_logprobs:
            return min(room, self._scored_budget)
        return room

    def start(self, seq: Sequence, borrowed: list[int]) -> None:
        """Start a sequence, whose table begins with `borrowed` pages."""
        self._started[seq] = borrowed

    def starts(self, seq: Sequence) -> bool:
        """Return whether a sequence starts with this step."""
        return seq in self._started

    def plan(
        self, seq: Sequence, count: int, new_pages: list[int], *, of_prompt: bool = False
    ) -> None:
        """Plan a sequence's next `count` tokens, for which it has `new_pages`."""
        self._counts[seq] = count
        if of_prompt:
            self._prompts.add(seq)
            self._prompt_budget = max(0, self._prompt_budget - count)
            if self._scored_budget is not None and seq.wants_prompt_logprobs:
                self._scored_budget -= count
        if new_pages:
            self._pages[seq] = new_pages
        self.budget -= count

    def plan_next(self, sequences: SequenceABC[Sequence]) -> None:
        """Plan the next token of sequences whose pages have room for it."""
        self._counts.update(dict.fromkeys(sequences, 1))
        self.budget -= len(sequences)

    def decoding(self) -> list[Sequence]:
        """Return the sequences that decode: their newest token is planned, and nothing else."""
        return [seq for seq in self._counts if seq not in self._prompts]

    def plan_drafts(self, seq: Sequence, draft_ids: SequenceABC[int], new_pages: list[int]) -> None:
        """Plan drafts after the next token of a sequence, which is not preempted any more."""
        self._counts[seq] += len(draft_ids)
        self._drafts[seq] = draft_ids
        if new_pages:
            self._pages[seq] = [*self._pages.get(seq, ()), *new_pages]
        self.budget -= len(draft_ids)

    def load(self, slot: int, lora_id: int) -> None:
        """Load an adapter into a slot, even if its sequence is cancelled later."""
        self._loads[slot] = lora_id

    def move(self, moves: BeamMoves | None, new_pages: Mapping[Sequence, list[int]]) -> None:
        """Move beams, which get these pages after their move."""
        self._moves = moves
        self._pages |= new_pages

    def cancel(self, seq: Sequence) -> int:
        """Remove a preempted sequence; return its tokens, 0 if it was not planned."""
        count = self._counts.pop(seq, 0)
        self.budget += count
        if seq in self._prompts:
            self._prompts.remove(seq)
            self._prompt_budget += count
        self._pages.pop(seq, None)
        self._started.pop(seq, None)
        return count

    def _embedded(
        self, order: SequenceABC[Sequence], starts: SequenceABC[int]
    ) -> EmbeddedTokens | None:
        """Return the embeddings that are given for the step's tokens."""
        # A list: a generator would cost a call for each row.
        if not [seq for seq in order if seq.request.embeddings is not None]:
            return None
        return EmbeddedTokens.of(
            (seq.request.embeddings, start, self._counts[seq])
            for seq, start in zip(order, starts, strict=True)
        )

    def launch(
        self, step_id: int, dropped: Iterable[int]
    ) -> tuple[StepPlan, dict[int, tuple[Sequence, int]]]:
        """Return the plan, one-token rows first, and each row's sequence and `num_starts`.

        The sequences' tokens are in flight from now on.
        """
        order = [seq for seq, count in self._counts.items() if count == 1]
        if len(order) < len(self._counts):
            order += [seq for seq, count in self._counts.items() if count > 1]
        page_rows: list[int] = []
        page_ids: list[int] = []
        windows: list[int] = []
        for seq in dict.fromkeys((*self._started, *self._pages)):
            pages = (*self._started.get(seq, ()), *self._pages.get(seq, ()))
            page_rows += [_row(seq)] * len(pages)
            page_ids += pages
            if seq.table.windows:
                windows += seq.table.windows[len(seq.table.pages) - len(pages) :]
        added = [seq for seq in order if seq in self._started] if self._started else []
        starts: list[int] = []
        samples: list[bool] = []
        rows: dict[int, tuple[Sequence, int]] = {}
        drafts = self._drafts
        for seq in order:  # one pass: the sequences of many rows do not fit the CPU's caches
            count = self._counts[seq]
            start = seq.num_computed + seq.num_in_flight_tokens
            is_last = seq in drafts or (
                len(seq.token_ids) + seq.num_pending_outputs == start + count
            )
            starts.append(start)
            samples.append(is_last)
            rows[_row(seq)] = seq, seq.num_starts
            seq.num_in_flight_tokens += count
            seq.num_pending_outputs += is_last
        plan = StepPlan(
            step_id=step_id,
            added=tuple(map(_row_init, added)),
            dropped=_ints(dropped),
            page_rows=_ints(page_rows),
            page_ids=_ints(page_ids),
            window_ids=_ints(windows),
            rows=_ints(rows),
            starts=_ints(starts),
            num_tokens=_ints(map(self._counts.__getitem__, order)),
            samples=np.array(samples, dtype=np.bool_),
            loads=tuple(SlotLoad(slot, lora_id) for slot, lora_id in self._loads.items()),
            num_drafts=_ints(len(drafts.get(seq, ())) for seq in order) if drafts else NO_DRAFTS,
            draft_ids=_drafts_in(order, drafts) if drafts else NO_TOKENS,
            embedded=self._embedded(order, starts),
            moves=self._moves,
        )
        return plan, rows


def _row(seq: Sequence) -> int:
    if seq.row is None:
        raise InvariantViolated(f"{seq.request.request_id} is planned without a row")
    return seq.row


def _row_init(seq: Sequence) -> RowInit:
    return RowInit(
        row=_row(seq),
        token_ids=np.array(seq.token_ids, dtype=np.int64),
        num_prompt_tokens=seq.num_prompt_tokens,
        seed=seq.seed,
        sampling=seq.request.sampling,
        prompt_logprobs=seq.request.sampling.prompt_logprobs if seq.wants_prompt_logprobs else None,
        hidden_states=seq.request.sampling.hidden_states,
        grammar=seq.request.grammar,
        reasoning=seq.request.reasoning,
        healed_id=seq.request.healed_id,
        adapter_slot=seq.adapter_slot,
        has_ids=seq.request.embeddings is None,
    )


def _drafts_in(
    order: Iterable[Sequence], drafts: Mapping[Sequence, SequenceABC[int]]
) -> TokenArray:
    return np.array([token for seq in order for token in drafts.get(seq, ())], dtype=np.int64)


def _ints(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int32)
