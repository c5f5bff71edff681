"""Runs step plans on rank 0: keeps the rows, forwards the plans, runs the forward pass, samples.

Knows nothing of requests, queues, how a forward pass computes or how other ranks are reached.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from remora.configs.planning.memory_report import PROMPT_LOGPROB_ROWS
from remora.engine.parallel.followers import Followers, NoFollowers
from remora.engine.parallel.group import Alone, Group
from remora.engine.protocols import AdapterPool, DeviceTokens, ForwardPass
from remora.engine.runner.inputs import InputBatch, StepInputs
from remora.engine.sampling.logprobs import concat_logprobs
from remora.engine.sampling.sampler import PendingSample, Sampler, SampleResult
from remora.engine.sampling.token_sampler import TokenSampler, describe
from remora.engine.spec.acceptance import DraftLines
from remora.engine.spec.drafter import Drafter
from remora.engine.types import (
    NO_TOKENS,
    FloatArray,
    IntArray,
    LogprobRows,
    RowInit,
    StepPlan,
    StepResult,
    TokenArray,
)

NO_ROWS: IntArray = np.empty(0, dtype=np.int32)
NOTHING_SAMPLED = SampleResult(rows=NO_ROWS, token_ids=NO_TOKENS)


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step between `begin` and `finish`.

    rows:  [R] of each line of logits
    gone:  rows that a later step has dropped or restarted
    """

    plan: StepPlan
    inputs: StepInputs
    rows: IntArray
    logits: Tensor
    forward_s: float
    drafts: DraftLines | None = None
    pending: PendingSample | None = None
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    hidden_states: dict[int, FloatArray] = field(default_factory=dict)
    sample_s: float = 0.0
    draft_s: float = 0.0
    gone: set[int] = field(default_factory=set)


def _without_given(init: RowInit) -> RowInit:
    """Return the row as the sampler sees it: without a prompt that has no token ids."""
    if init.has_ids:
        return init
    outputs = init.token_ids[init.num_prompt_tokens :]
    return replace(init, token_ids=outputs, num_prompt_tokens=0)


class LocalRunner:
    """Rank 0, in this process. Steps may overlap if the forward pass is given `device_tokens`."""

    def __init__(
        self,
        forward: ForwardPass,
        sampler: Sampler,
        table: InputBatch,
        followers: Followers | None = None,
        group: Group | None = None,
        adapters: AdapterPool | None = None,
        *,
        device_tokens: DeviceTokens | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Join the parts; the runner closes them, but for the adapters.

        device_tokens:  receives sampled tokens before the host knows them
        drafter:        makes pending drafts
        """
        self._forward = forward
        self._sampler = sampler
        self._table = table
        self._followers = followers or NoFollowers()
        self._group = group or Alone()
        self._adapters = adapters
        self._device_tokens = device_tokens
        self._drafter = drafter
        self._steps: deque[_Step] = deque()
        # Tokens of steps that finished since the last one began, for the followers.
        self._finished: list[tuple[IntArray, TokenArray]] = []
        self._prompts: dict[int, RowInit] = {}
        self._shown: set[int] = set()  # rows that asked for hidden states

    def possible_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Return how many drafts of each (row, drafts) may come; see `Sampler`."""
        return self._sampler.possible_drafts(drafts)

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes of rows, and start its forward pass."""
        with self._step_errors():
            self._begin(plan)

    def sample(self, ended: Collection[int] = ()) -> None:
        """Start to sample the step that was begun last; see `Runner`."""
        with self._step_errors():
            self._sample(self._steps[-1], ended)

    def finish(self) -> StepResult:
        """Wait for the oldest sampled step."""
        with self._step_errors():
            return self._finish(self._steps.popleft())

    @property
    def forward_pass(self) -> ForwardPass:
        """The forward pass in use."""
        return self._forward

    @property
    def group(self) -> Group:
        """The group of this rank."""
        return self._group

    def exchange(self, forward: ForwardPass, token_sampler: TokenSampler) -> None:
        """Replace the forward pass and close the old one. Only while there are no rows."""
        self._forward.close()
        self._forward = forward
        self._sampler.token_sampler = token_sampler

    def rejoin(self, followers: Followers, group: Group) -> None:
        """Replace lost ranks by others, which know no rows; rank 0's rows are dropped, too.

        Steps that have begun will have no result.
        """
        self._followers.close()
        self._group.close()
        self._followers, self._group = followers, group
        self._steps.clear()
        self._finished.clear()
        self._prompts.clear()
        self._shown.clear()
        self._sampler.drop_rows()
        if self._drafter is not None:
            self._drafter.drop_rows()

    def close(self) -> None:
        """Stop the followers, the sampler, the forward pass and the group."""
        self._followers.close()
        self._sampler.close()
        if self._drafter is not None:
            self._drafter.close()
        self._forward.close()
        self._group.close()

    @contextmanager
    def _step_errors(self) -> Iterator[None]:
        """Run a part of a step; an error that another rank caused is raised as that rank's."""
        try:
            with torch.inference_mode():
                yield
        except Exception as error:
            cause = self._followers.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    def _finish(self, step: _Step) -> StepResult:
        started = time.perf_counter()
        sampled = NOTHING_SAMPLED
        if step.pending is not None:
            sampled = self._sampler.finish(step.pending, step.gone)
            rows, token_ids = sampled.rows, sampled.token_ids
            if step.gone:
                stays = ~np.isin(rows, list(step.gone))
                rows, token_ids = rows[stays], token_ids[stays]
            add = self._table.add_tokens if step.drafts is None else self._table.add_runs
            add(rows, token_ids)
            self._finished.append((rows, token_ids))
        return StepResult(
            step_id=step.plan.step_id,
            rows=sampled.rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=step.prompt_logprobs,
            hidden_states=step.hidden_states,
            bad_rows=sampled.bad_rows,
            completed=sampled.completed,
            candidates=sampled.candidates,
            forward_s=step.forward_s,
            sample_s=step.sample_s + time.perf_counter() - started,
            draft_s=step.draft_s,
        )

    def _begin(self, plan: StepPlan) -> None:
        rows, token_ids = NO_ROWS, NO_TOKENS
        if self._finished:
            rows, token_ids = map(np.concatenate, zip(*self._finished, strict=True))
            self._finished = []
        draft_s = 0.0
        if self._drafter is None:
            self._followers.step(plan, rows, token_ids)  # first: they have as much to do as rank 0
            self._update_rows(plan)
        else:
            self._update_rows(plan)
            plan, draft_s = self._complete(plan, self._drafter)
            self._followers.step(plan, rows, token_ids)
        inputs = self._table.inputs(plan)
        drafts = DraftLines.of(plan)
        rows = plan.rows[plan.samples] if drafts is None else drafts.rows
        started = time.perf_counter()
        if not self._steps:  # with a step in flight, the constraints lack its tokens
            self._sampler.begin(rows, drafts)
        self._sampler.prepare(rows, drafts)
        logits = self._forward.forward(inputs)
        forward_s = time.perf_counter() - started
        self._steps.append(
            _Step(
                plan=plan,
                inputs=inputs,
                rows=rows,
                logits=logits,
                forward_s=forward_s,
                drafts=drafts,
                draft_s=draft_s,
            )
        )

    @staticmethod
    def _complete(plan: StepPlan, drafter: Drafter) -> tuple[StepPlan, float]:
        """Return the plan with its pending drafts made, and the seconds that it took."""
        started = time.perf_counter()
        completed = drafter.complete(plan)
        return completed, 0.0 if completed is plan else time.perf_counter() - started

    def _sample(self, step: _Step, ended: Collection[int]) -> None:
        started = time.perf_counter()
        for row in ended:
            self._sampler.drop_row(row)
            self._prompts.pop(row, None)
        if len(step.rows):
            step.pending = self._sampler.choose(step.logits, step.rows, step.drafts)
            if self._device_tokens is not None:
                self._device_tokens.set_last_tokens(step.pending.sampled.token_ids)
        if self._shown:
            step.hidden_states = self._hidden_states(step.plan, step.inputs)
        # After sampling: these logits overwrite the step's.
        step.prompt_logprobs = self._prompt_logprobs(step.plan, step.inputs)
        step.sample_s = time.perf_counter() - started

    def _update_rows(self, plan: StepPlan) -> None:
        if self._adapters is not None:
            for load in plan.loads:
                self._adapters.install(load.slot, load.lora_id)
        for step in self._steps:
            step.gone |= {*plan.dropped.tolist(), *(init.row for init in plan.added)}
        for row in plan.dropped.tolist():
            self._sampler.drop_row(row)
            self._prompts.pop(row, None)
            self._shown.discard(row)
        for init in plan.added:
            self._table.start(init)
            self._sampler.add_row(_without_given(init))
            if init.prompt_logprobs is not None:
                self._prompts[init.row] = init
            if init.hidden_states:
                self._shown.add(init.row)
        if plan.moves is not None:
            self._table.move(plan.moves)
            self._sampler.move(plan.moves)
        if len(plan.page_rows):
            self._table.add_pages(plan.page_rows, plan.page_ids, plan.window_ids)

    def _hidden_states(self, plan: StepPlan, inputs: StepInputs) -> dict[int, FloatArray]:
        """Copy the hidden states of this step's tokens, for rows that asked."""
        found: dict[int, FloatArray] = {}
        for place, row in enumerate(plan.rows.tolist()):
            if row in self._shown:
                first = int(inputs.starts[place])
                states = self._forward.hidden(first, first + int(plan.num_tokens[place]))
                found[row] = states.float().cpu().numpy().copy()
        return found

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
                asked = init.prompt_logprobs, init.sampling.logprob_token_ids
                scored[row] = self._score(int(inputs.starts[place]), targets, *asked)
        return scored

    def _score(
        self,
        first: int,
        targets: np.ndarray[tuple[int], np.dtype[np.int64]],
        top: int,
        asked: tuple[int, ...],
    ) -> LogprobRows:
        parts = []
        for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[at : at + PROMPT_LOGPROB_ROWS]
            self._followers.logits(first + at, first + at + len(part))
            logits = self._forward.logits(first + at, first + at + len(part))
            parts.append(describe(logits, part, top, self._sampler.token_sampler.kernels, asked))
        return concat_logprobs(parts)
