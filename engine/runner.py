"""Runs step plans on rank 0: keeps the rows, tells the other ranks, runs the forward pass, samples.

Knows nothing of requests, queues or why a row is in the step, nor of how a forward pass is made
or the other ranks are reached.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from remora.engine.inputs import RowTable, StepInputs
from remora.engine.logprobs import concat_logprobs
from remora.engine.parallel.followers import Followers, NoFollowers
from remora.engine.parallel.group import Alone, Group
from remora.engine.protocols import PROMPT_LOGPROB_ROWS, AdapterPool, ForwardPass
from remora.engine.sampling import SampledTokens, Sampler, prompt_logprobs
from remora.engine.types import LogprobRows, RowInit, StepPlan, StepResult

NOTHING_SAMPLED = SampledTokens(token_ids=np.empty(0, dtype=np.int64))
NOBODY = np.empty(0, dtype=np.int32)


class LocalRunner:
    """Rank 0, in this process."""

    def __init__(
        self,
        forward: ForwardPass,
        sampler: Sampler,
        table: RowTable,
        followers: Followers | None = None,
        group: Group | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        self._forward = forward
        self._sampler = sampler
        self._table = table
        self._followers = followers or NoFollowers()
        self._group = group or Alone()
        self._adapters = adapters
        self._sampled = (NOBODY, NOTHING_SAMPLED.token_ids)
        self._prompts: dict[int, RowInit] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample the rows that the plan asks for."""
        try:
            return self._execute(plan)
        except Exception as error:
            blamed = self._followers.blame(error)
            if blamed is error:
                raise
            raise blamed from error

    def _execute(self, plan: StepPlan) -> StepResult:
        self._followers.step(plan, *self._sampled)  # first: they have as much to do as we
        self._update_rows(plan)
        inputs = self._table.inputs(plan)
        rows = plan.rows[plan.samples]
        started = time.perf_counter()
        self._sampler.begin(rows)
        logits = self._forward.forward(inputs)
        forwarded = time.perf_counter()
        sampled = NOTHING_SAMPLED
        if len(rows):
            sampled = self._sampler.sample(logits, rows)
            self._table.add_tokens(rows, sampled.token_ids)
        self._sampled = (rows, sampled.token_ids)
        scored = self._prompt_logprobs(plan, inputs)  # after sampling: its logits replace those
        return StepResult(
            step_id=plan.step_id,
            rows=rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=scored,
            bad_rows=sampled.bad_rows,
            completed=sampled.completed,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def close(self) -> None:
        """Stop what forward pass and sampler have started; their memory goes with the object."""
        self._followers.close()
        self._sampler.close()
        self._forward.close()
        self._group.close()

    def _update_rows(self, plan: StepPlan) -> None:
        if self._adapters is not None:
            for load in plan.loads:
                self._adapters.install(load.slot, load.instance)
        for row in plan.dropped.tolist():
            self._sampler.drop_row(row)
            self._prompts.pop(row, None)
        for init in plan.added:
            self._table.start(init)
            self._sampler.add_row(init)
            if init.prompt_logprobs is not None:
                self._prompts[init.row] = init
        if len(plan.page_rows):
            self._table.add_pages(plan.page_rows, plan.page_ids)

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs) -> dict[int, LogprobRows]:
        """Score the prompt tokens that this step's positions predict, for rows that asked."""
        scored: dict[int, LogprobRows] = {}
        if not self._prompts:
            return scored
        for place, row in enumerate(plan.rows.tolist()):
            init = self._prompts.get(row)
            if init is None or init.prompt_logprobs is None:
                continue
            start = int(plan.starts[place])
            count = min(int(plan.num_tokens[place]), init.num_prompt_tokens - 1 - start)
            if count > 0:
                targets = init.token_ids[start + 1 : start + 1 + count]
                scored[row] = self._score(int(inputs.starts[place]), targets, init.prompt_logprobs)
        return scored

    def _score(
        self, first: int, targets: np.ndarray[tuple[int], np.dtype[np.int64]], top: int
    ) -> LogprobRows:
        parts = []
        for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[at : at + PROMPT_LOGPROB_ROWS]
            self._followers.logits(first + at, first + at + len(part))
            logits = self._forward.logits(first + at, first + at + len(part))
            parts.append(prompt_logprobs(logits, part, top, self._sampler.kernels))
        return concat_logprobs(parts)
