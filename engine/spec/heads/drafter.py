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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remora.engine.graphs import step_norms
from remora.engine.graphs.step_program import fill_batch
from remora.engine.layers.norm import Norm
from remora.engine.runner.inputs import InputBatch, Int64Array, StepInputs
from remora.engine.sampling.sampler import Sampler
from remora.engine.spec.drafter import PENDING
from remora.engine.spec.heads.head import DraftHead
from remora.engine.spec.heads.program import HeadProgram
from remora.engine.spec.stop_tokens import StopTokens
from remora.engine.types import IntArray, StepPlan, TokenArray
from remora.kernels.cpu.norms import NormWeights

_MOST_KEPT = 16  # states that wait for the head while no row has drafts

States = Callable[[Tensor], Tensor]
"""Returns the target's states [N, state_size] of tokens [N] of its latest step."""


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
        head: DraftHead,
        program: HeadProgram,
        sampler: Sampler,
        table: InputBatch,
        *,
        states: States,
        embedding: Tensor,
        embedding_scale: float,
        max_tokens: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        """Begin without rows.

        states:           of the target's latest step
        embedding:        [vocab_size, H] of the target
        embedding_scale:  factor on its rows
        max_tokens:       of one pass
        """
        self._head, self._program = head, program
        self._embedding_norm = _converted(head.embedding_norm)
        self._hidden_norm = _converted(head.hidden_norm)
        self._last_norm = _converted(head.decoder.norm if head.config.own_norm else None)
        self._sampler, self._table = sampler, table
        self._states = states
        self._embedding, self._embedding_scale = embedding, embedding_scale
        self._stops = StopTokens(eos_token_ids, vocab_size)
        self._max_tokens = max_tokens
        self._before: _Step | None = None
        self._kept: dict[int, _Kept] = {}

    def complete(self, plan: StepPlan) -> StepPlan:
        """Follow the step before, and draft for rows with PENDING drafts; see `Drafter`."""
        self._stops.begin(plan)
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
                draft_ids[at] = drafts.get(row, self._stops.other_than(row, 0))
        return replace(plan, draft_ids=draft_ids)

    def close(self) -> None:
        """Do nothing: the target's pass closes the threads."""

    def _keep(self, step: _Step, gone: set[int]) -> None:
        """Copy the states of a step's kept tokens, which the target's next step overwrites."""
        stays = np.array([row not in gone for row in step.rows.tolist()], np.bool_)
        rows, starts = step.rows[stays], step.starts[stays]
        counts = np.minimum(step.counts[stays], self._table.lengths(rows) - 1 - starts)
        total = int(counts.clip(0).sum())
        if sum(kept.count for kept in self._kept.values()) + total > self._max_tokens:
            self._follow({})
        for row, start, count, place in zip(
            rows.tolist(),
            starts.tolist(),
            counts.tolist(),
            step.places[stays].tolist(),
            strict=True,
        ):
            if count > 0:
                kept = self._kept.setdefault(row, _Kept(start, []))
                kept.states.append(self._states(torch.arange(place, place + count)))
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
        )
        states = torch.cat([each for kept in chosen for each in kept.states])
        logits, states = self._run(inputs, states, is_target=True)
        rows = rows[samples]
        return self._continue(rows, logits, states, wanted) if len(rows) else {}

    def _continue(
        self, rows: IntArray, logits: Tensor, states: Tensor, wanted: dict[int, int]
    ) -> dict[int, TokenArray]:
        """Draft a first token for each row from its logits [S, V], and others from the head's own.

        states:  [S, H] of the head, which the logits are of
        """
        lengths = self._table.lengths(rows)
        limits = np.array([wanted[row] for row in rows.tolist()], np.int64)
        drafts = np.zeros((len(rows), int(limits.max())), np.int64)
        drafts[:, 0] = self._guess(logits, rows, ahead=0)
        at = np.arange(len(rows))
        for ahead in range(1, drafts.shape[1]):
            stays = limits[at] > ahead
            at, states = at[stays], states[torch.from_numpy(stays)]
            inputs = self._table.span(
                rows[at].astype(np.int64),
                lengths[at] + ahead - 2,
                np.ones_like(at),
                np.ones(len(at), np.bool_),
            )
            inputs = replace(inputs, token_ids=drafts[at, ahead - 1])
            logits, states = self._run(inputs, states, is_target=False)
            drafts[at, ahead] = self._guess(logits, rows[at], ahead=ahead)
        return {
            row: ids[:limit]
            for row, ids, limit in zip(rows.tolist(), drafts, limits.tolist(), strict=True)
        }

    def _guess(self, logits: Tensor, rows: IntArray, *, ahead: int) -> TokenArray:
        token_ids = self._sampler.guess(logits, rows, ahead=ahead)
        if self._head.draft_ids is not None:
            token_ids = self._head.draft_ids[torch.from_numpy(token_ids)].numpy()
        return self._stops.avoid(rows, token_ids)

    def _run(self, inputs: StepInputs, states: Tensor, *, is_target: bool) -> tuple[Tensor, Tensor]:
        """Run the head; returns logits [R, vocabulary] and its states [R, H] to continue from.

        states:     [T, state_size] of the target, or [T, H] of the head itself
        """
        program, count = self._program, inputs.num_tokens
        embedded = F.embedding(torch.from_numpy(inputs.token_ids), self._embedding).float()
        embedded = embedded * self._embedding_scale
        embedded = _normalised(self._embedding_norm, embedded)
        size = embedded.shape[1]
        if program.inputs is None:
            states = _normalised(self._hidden_norm, states.float())
            order = (states, embedded) if self._head.config.states_first else (embedded, states)
            program.joined[:count, : 2 * size] = torch.cat(order, dim=1)
            program.join(count)
        else:
            if is_target:
                program.joined[:count, : states.shape[1]] = states
                program.join(count)
            else:
                program.stream[:count, :size] = states
            program.inputs[:count, :size] = embedded
            program.inputs[:count, size : 2 * size] = _normalised(
                self._hidden_norm, program.stream[:count, :size]
            )
        inputs = replace(inputs, adapters=np.zeros_like(inputs.adapters))
        fill_batch(program.batch, inputs)
        program.layer(count, len(inputs.rows))
        outputs = program.stream[torch.from_numpy(inputs.logit_index), :size]
        num_rows = len(outputs)
        if not num_rows:
            return program.logits[:0], outputs
        final = _normalised(self._last_norm, outputs)
        program.final[:num_rows, :size] = final
        logits = program.head(num_rows)
        return logits, final if self._head.config.kind == "mtp" else outputs


def _converted(norm: Norm | None) -> NormWeights | None:
    return None if norm is None else step_norms.of_rows(norm, residual_scale=1.0)


def _normalised(norm: NormWeights | None, x: Tensor) -> Tensor:
    """Normalise rows in float32."""
    if norm is None:
        return x
    if norm.is_centered:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.epsilon)


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
