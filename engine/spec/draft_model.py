"""Drafts by a smaller model, which has its own KV on the pages of the model that it drafts for.

A row that gets drafts is first brought up to its newest token, in one pass with those of other rows
where little is missing; then each further draft is a pass of one token a row. Rows without drafts
cost nothing. A device keeps drafts for the next pass, so passes are launched without waiting for
the one before (`draft_chain.py`). Tokens are drawn with the random numbers of the positions that
they are drafted for, so they are right more often than independent draws. What it computes changes
the number of steps only (`acceptance.py`). Knows rows and tokens; nothing of requests.

Legend: S rows with drafts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from remora.engine.protocols import ForwardPass
from remora.engine.runner.inputs import InputBatch, Int64Array, StepInputs
from remora.engine.sampling.sampler import Sampler
from remora.engine.sampling.token_sampler import TokenSampler
from remora.engine.spec.draft_chain import DraftChain
from remora.engine.spec.draft_coverage import DraftCoverage
from remora.engine.spec.drafter import PENDING
from remora.engine.types import IntArray, StepPlan, TokenArray

_LAST_TOKENS = 2  # that a row computes together with its first draft: a draft, and what followed


class DraftModel:
    """Drafter with a model of its own."""

    def __init__(
        self,
        forward: ForwardPass,
        token_sampler: TokenSampler,
        chain: DraftChain,
        sampler: Sampler,
        table: InputBatch,
        *,
        num_pages: int,
        page_size: int,
        max_tokens: int,
        draft_vocab_size: int,
        vocab_size: int,
    ) -> None:
        """Begin without rows.

        forward:        of the draft model, whose KV has the same pages as the target's
        token_sampler:  for its logits
        chain:          collects its drafts
        sampler:        of the target model, which knows how rows draw
        table:          the target's rows
        max_tokens:     of one pass
        draft_vocab_size, vocab_size:  of the draft model and of the target; ids mean the same, and
                        one may have more of them
        """
        self._forward = forward
        self._token_sampler = token_sampler
        self._chain = chain
        self._sampler = sampler
        self._table = table
        self._new_pages = table.log_pages()
        self._coverage = DraftCoverage(table.tables, num_pages=num_pages, page_size=page_size)
        self._max_tokens = max_tokens
        self._draft_vocab_size = draft_vocab_size
        self._vocab_size = vocab_size
        self._has_more_tokens = draft_vocab_size > vocab_size

    def complete(self, plan: StepPlan) -> StepPlan:
        """Draft for the rows that have PENDING drafts; see `Drafter`."""
        self._coverage.begin(plan)
        self._chain.stops.begin(plan)
        if PENDING not in plan.draft_ids:
            return plan
        ends = np.cumsum(plan.num_drafts)
        places = (plan.num_drafts > 0).nonzero()[0]
        places = places[plan.draft_ids[(ends - plan.num_drafts)[places]] == PENDING]
        missing = plan.starts[places] + 1 - self._coverage.counts(plan.rows[places])
        order = np.argsort(missing == _LAST_TOKENS, kind="stable")  # rows with one token first
        places = places[order]
        counts = plan.num_drafts[places]
        drafted = self._draft(plan.rows[places], plan.starts[places].astype(np.int64) + 1, counts)
        draft_ids = plan.draft_ids.copy()
        for place, ids, count in zip(places.tolist(), drafted, counts.tolist(), strict=True):
            draft_ids[ends[place] - count : ends[place]] = ids[:count]
        return replace(plan, draft_ids=draft_ids)

    def drop_rows(self) -> None:
        """Do nothing: what is known of a row is replaced when it starts."""

    def close(self) -> None:
        """Close the model's forward pass."""
        self._forward.close()

    def _draft(self, rows: IntArray, lengths: Int64Array, counts: IntArray) -> TokenArray:
        """Return drafts [S, most of counts]; a row's count of them is meant.

        lengths:  [S] known tokens
        counts:   [S] drafts
        """
        self._catch_up(rows, lengths - 1)
        self._chain.begin(rows)
        at = np.arange(len(rows))
        first = self._coverage.counts(rows)
        missing = lengths - first
        for ahead in range(int(counts.max())):
            drawn = self._next(rows[at], first, missing, ahead=ahead)
            known = self._chain.add(at, drawn)
            stays = counts[at] > ahead + 1
            at = at[stays]
            first, missing = lengths[at] + ahead, np.ones_like(at)
            self._table.put(rows[at], first, known[stays])
        self._coverage.cover(rows, lengths + counts - 1)
        return self._chain.take()

    def _catch_up(self, rows: IntArray, ends: Int64Array) -> None:
        """Compute the tokens of rows before `ends` [S], where more than the last are missing."""
        covered = self._coverage.counts(rows)
        for row, first, end in zip(rows, covered.tolist(), ends.tolist(), strict=True):
            if end - first < _LAST_TOKENS:
                continue
            for start in range(first, end, self._max_tokens):
                count = min(self._max_tokens, end - start)
                self._run(*np.array([[row], [start], [count]]), wanted=False)
            self._coverage.cover(np.array([row]), np.array([end]))

    def _next(self, rows: IntArray, first: Int64Array, counts: Int64Array, *, ahead: int) -> Tensor:
        """Compute tokens of rows; returns what the draft model expects after the last ones [S]."""
        draws, is_larger = self._sampler.draws_ahead(rows, ahead), self._has_more_tokens
        # A graph draws from all logits, so not from those of a larger vocabulary.
        self._token_sampler.prepare(draws, is_plain=not is_larger)
        logits = self._run(rows, first, counts, wanted=True)
        return self._token_sampler.guess(
            logits[:, : self._vocab_size] if is_larger else logits, draws
        )

    def _run(
        self, rows: IntArray | Int64Array, first: Int64Array, counts: Int64Array, *, wanted: bool
    ) -> Tensor:
        inputs = self._table.span(
            rows.astype(np.int64),
            first,
            counts,
            np.full(len(rows), wanted),
            grown=self._new_pages.take(),
        )
        return self._forward.forward(self._known(inputs))

    def _known(self, inputs: StepInputs) -> StepInputs:
        """Return inputs without adapters, whose tokens the draft model has."""
        token_ids = inputs.token_ids
        if self._draft_vocab_size < self._vocab_size:
            token_ids = np.minimum(token_ids, self._draft_vocab_size - 1)
        return replace(inputs, token_ids=token_ids, adapters=np.zeros_like(inputs.adapters))
