"""The fake model with beams: candidates are a function of the context, and pages are copied.

A page that is shared while it is written to, or not copied, shows as another beam's token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from remora.engine.beams.moves import BeamMoves
from remora.engine.beams.params import BeamParams
from remora.engine.types import Candidates, Request, SamplingParams, StepPlan, StepResult
from tests.engine.fakes import VOCAB, FakeRunner


def next_scores(context: list[int], adapter: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probabilities [VOCAB] after a context."""
    state = len(context) + 1000 * adapter
    for token in context:
        state = (state * 31 + token + 7) % 1_000_003
    logits = np.random.default_rng(state).normal(0.0, 2.0, VOCAB)
    made: np.ndarray[Any, np.dtype[np.float32]] = (logits - np.log(np.exp(logits).sum())).astype(
        np.float32
    )
    return made


def beam_request(
    name: str, prompt: list[int], *, max_tokens: int = 8, n: int = 1, **beams: Any
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, beams=BeamParams(**beams))
    return Request(request_id=name, prompt_ids=prompt, sampling=sampling)


class BeamRunner(FakeRunner):
    """Executes plans with moves."""

    num_shared: int = 0  # most pages that beams had in common with others

    def take_in(self, plan: StepPlan) -> None:
        for row in plan.dropped.tolist():  # beams that never came to be are not known
            self.tables.setdefault(row, []), self.tokens.setdefault(row, [])
        pages = plan.page_rows, plan.page_ids
        if plan.moves is None:
            super().take_in(plan)
            return
        for row in plan.dropped.tolist():
            del self.tables[row], self.tokens[row]
        for init in plan.added:
            self.tables[init.row], self.tokens[init.row] = [], init.token_ids.tolist()
            self.rows[init.row] = init
        self.move(plan.moves)
        for row, page in zip(*(array.tolist() for array in pages), strict=True):
            self.tables[row].append(page)
        used = [page for row in plan.moves.rows.tolist() for page in self.tables[row]]
        self.num_shared = max(self.num_shared, len(used) - len(set(used)))

    def move(self, moves: BeamMoves) -> None:
        tables, tokens, rows = dict(self.tables), dict(self.tokens), dict(self.rows)
        for row, source, token, kept in zip(
            moves.rows.tolist(),
            moves.sources.tolist(),
            moves.token_ids.tolist(),
            moves.num_kept.tolist(),
            strict=True,
        ):
            self.tables[row], self.tokens[row] = tables[source][:kept], [*tokens[source], token]
            self.rows[row] = rows[source]
        for page, copy in moves.copies.T.tolist():
            for offset in range(self.page_size):
                known = self.memory.get(page * self.page_size + offset)
                if known is not None:
                    self.memory[copy * self.page_size + offset] = known

    def choose(self, plan: StepPlan, ended: Collection[int] = ()) -> StepResult:
        sampled = plan.rows[plan.samples].tolist()
        beams = {row for row in sampled if self.rows[row].sampling.beams is not None}
        found: dict[int, Candidates] = {}
        for row in beams - {*ended}:
            scores = next_scores(self.read(row, self.tokens[row]), self.adapter(row))
            best = np.argsort(-scores, kind="stable")[: 2 * 8 + 8]
            found[row] = Candidates(token_ids=best, scores=scores[best])
        known = {row: list(self.tokens[row]) for row in beams}
        made = super().choose(plan, ended)
        self.tokens |= known
        stays = ~np.isin(made.rows, list(beams))
        return StepResult(
            step_id=made.step_id,
            rows=made.rows[stays],
            token_ids=made.token_ids[stays],
            logprobs=made.logprobs,
            prompt_logprobs=made.prompt_logprobs,
            bad_rows={row: self.fault for row in sampled if row in self.bad_rows},
            candidates=found,
        )
