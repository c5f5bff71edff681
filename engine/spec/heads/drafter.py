"""Drafts by a trained head from the target's hidden states: EAGLE, EAGLE-3 and MTP layers.

When a step begins, the head first reads what the step before has settled: for each row the states
of its kept tokens, and the tokens that followed them. The last of these predicts a draft, and the
head's own state continues it. Rows are followed whether they have drafts or not, because the
target's states are gone afterwards; without drafts, several steps at a time. Tokens that are found
in the prefix cache keep the head's KV of the sequence that computed them; at the last of them the
token that followed may have been another one, which costs acceptance and nothing else. Knows rows
and tokens; nothing of requests.

Legend: T tokens, S rows, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from remora.engine.runner.inputs import InputBatch, Int64Array, StepInputs
from remora.engine.sampling.sampler import Sampler
from remora.engine.spec.draft_chain import DraftChain
from remora.engine.spec.drafter import PENDING
from remora.engine.spec.heads.passes import HeadPass, States
from remora.engine.types import IntArray, StepPlan, TokenArray
from remora.kernels.memory import to_device

_MOST_KEPT = 16  # states that wait for the head while no row has drafts


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose tokens are known when the next one begins.

    places:  [S] first token of each row in the step
    """

    rows: IntArray
    starts: Int64Array
    counts: Int64Array
    places: Int64Array


@dataclass(slots=True)
class _Kept:
    """States of a row that the head has not read yet: `start` is the position of the first."""

    start: int
    states: list[Tensor]
    count: int = 0


class HeadDrafter:
    """Drafter with a draft head."""

    def __init__(
        self,
        head: HeadPass,
        chain: DraftChain,
        sampler: Sampler,
        table: InputBatch,
        *,
        states: States,
        max_tokens: int,
    ) -> None:
        """Begin without rows; `close` closes the head's pass.

        chain:       collects the drafts
        sampler:     of the target model, which knows how rows draw
        table:       the target's rows
        states:      of the target's latest step
        max_tokens:  of one pass
        """
        self._head, self._chain = head, chain
        self._sampler, self._table = sampler, table
        self._new_pages = table.log_pages()
        self._states = states
        self._max_tokens = max_tokens
        self._before: _Step | None = None
        self._kept: dict[int, _Kept] = {}

    def complete(self, plan: StepPlan) -> StepPlan:
        """Follow the step before, and draft for rows with PENDING drafts; see `Drafter`."""
        self._chain.stops.begin(plan)
        gone = {*plan.dropped.tolist(), *(init.row for init in plan.added)}
        if plan.moves is not None:  # beams have no drafts
            gone |= {*plan.moves.rows.tolist()}
        for row in gone:
            self._kept.pop(row, None)
        if self._before is not None:
            self._keep(self._before, gone)
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        self._before = _Step(
            plan.rows, plan.starts.astype(np.int64), plan.num_tokens.astype(np.int64), starts
        )
        wanted = _pending(plan)
        num_kept = sum(kept.count for kept in self._kept.values())
        if not wanted:
            if num_kept >= _MOST_KEPT:
                self._follow({})
            return plan
        drafts = self._follow(wanted)
        ends = np.cumsum(plan.num_drafts)
        draft_ids = plan.draft_ids.copy()
        for place, row in enumerate(plan.rows.tolist()):
            if row in wanted:
                at = slice(int(ends[place]) - wanted[row], int(ends[place]))
                # A row that sat out the step before may have no state to continue.
                draft_ids[at] = drafts.get(row, self._chain.stops.other_than(row, 0))
        return replace(plan, draft_ids=draft_ids)

    def drop_rows(self) -> None:
        """Forget the states of all rows; see `Drafter`."""
        self._before = None
        self._kept = {}

    def close(self) -> None:
        """Close the head's pass."""
        self._head.close()

    def _keep(self, step: _Step, gone: set[int]) -> None:
        """Copy the states of a step's kept tokens, which the target's next step overwrites."""
        lengths = self._table.lengths(step.rows)
        counts = np.minimum(step.counts, lengths - 1 - step.starts)
        stays = np.array([row not in gone for row in step.rows.tolist()], np.bool_) & (counts > 0)
        if not stays.any():
            return
        rows, counts, places = step.rows[stays], counts[stays], step.places[stays]
        if sum(kept.count for kept in self._kept.values()) + counts.sum() > self._max_tokens:
            self._follow({})
        ends = np.cumsum(counts)
        index = np.arange(ends[-1]) + np.repeat(places - (ends - counts), counts)
        states = torch.split(self._states(index), counts.tolist())
        starts = step.starts[stays].tolist()
        for row, start, count, own in zip(
            rows.tolist(), starts, counts.tolist(), states, strict=True
        ):
            kept = self._kept.setdefault(row, _Kept(start, []))
            kept.states.append(own)
            kept.count += count

    def _follow(self, wanted: dict[int, int]) -> dict[int, TokenArray]:
        """Read all kept states; returns drafts of the wanted rows."""
        order = sorted(self._kept, key=lambda row: self._kept[row].count > 1)
        if not order:
            return {}
        chosen = [self._kept[row] for row in order]
        self._kept = {}
        rows = np.array(order, np.int32)
        samples = np.array([row in wanted for row in order], np.bool_)
        inputs = self._table.span(
            rows.astype(np.int64),
            np.array([kept.start for kept in chosen]),
            np.array([kept.count for kept in chosen]),
            samples,
            shift=1,
            grown=self._new_pages.take(),
        )
        states = torch.cat([each for kept in chosen for each in kept.states])
        rows = rows[samples]
        if not len(rows):
            self._head.run(inputs, states, is_target=True)
            return {}
        drawn, states = self._next(inputs, states, rows, ahead=0)
        return self._continue(rows, drawn, states, wanted)

    def _continue(
        self, rows: IntArray, drawn: Tensor, states: Tensor, wanted: dict[int, int]
    ) -> dict[int, TokenArray]:
        """Draft on from first drafts [S] of rows.

        states:  [S, H] of the head, which drew them
        """
        lengths = self._table.lengths(rows)
        limits = np.array([wanted[row] for row in rows.tolist()], np.int64)
        most = int(limits.max())
        self._chain.begin(rows)
        at = np.arange(len(rows))
        for ahead in range(1, most + 1):
            known = self._chain.add(at, drawn)
            if ahead == most:
                break
            stays = limits[at] > ahead
            if not stays.all():
                states = states.index_select(0, to_device(stays.nonzero()[0], states.device))
                at = at[stays]
            inputs = self._table.span(
                rows[at].astype(np.int64),
                lengths[at] + ahead - 2,
                np.ones_like(at),
                np.ones(len(at), np.bool_),
            )
            inputs = replace(inputs, token_ids=known[stays])
            drawn, states = self._next(inputs, states, rows[at], ahead=ahead)
        return {
            row: ids[:limit]
            for row, ids, limit in zip(
                rows.tolist(), self._chain.take(), limits.tolist(), strict=True
            )
        }

    def _next(
        self, inputs: StepInputs, states: Tensor, rows: IntArray, *, ahead: int
    ) -> tuple[Tensor, Tensor]:
        """Run the head; returns what rows draw [S] int64, and the states that drew it [S, H].

        ahead:  drafts before this one; states of the first are the target's
        """
        draws, sampler = self._sampler.draws_ahead(rows, ahead), self._head.token_sampler
        sampler.prepare(draws, is_plain=True)
        logits, states = self._head.run(inputs, states, is_target=ahead == 0)
        token_ids = sampler.guess(logits, draws)
        ids = self._head.draft_ids
        if ids is not None:
            token_ids = ids.index_select(0, token_ids.clamp(0, len(ids) - 1))
        return token_ids, states


def _pending(plan: StepPlan) -> dict[int, int]:
    """Return the rows with PENDING drafts, and how many."""
    if PENDING not in plan.draft_ids:
        return {}
    firsts = np.cumsum(plan.num_drafts) - plan.num_drafts
    return {
        row: count
        for row, count, first in zip(
            plan.rows.tolist(), plan.num_drafts.tolist(), firsts.tolist(), strict=True
        )
        if count and plan.draft_ids[first] == PENDING
    }
