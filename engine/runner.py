"""Runs step plans on one device: keeps each row's tokens and pages, builds the flat batch, samples.

Row state is updated by the plan's deltas, so a plan never repeats a prompt or a block table. Knows
nothing of requests, queues or why a row is in the step.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from remora.engine.batch import ForwardBatch
from remora.engine.kv.pages import DUMP_PAGE, pages_needed
from remora.engine.logprobs import concat_logprobs
from remora.engine.protocols import AttentionBackend, Model
from remora.engine.sampling import Sampler, prompt_logprobs
from remora.engine.types import IntArray, LogprobRows, RowInit, StepPlan, StepResult

PROMPT_LOGPROB_ROWS = 64  # rows of vocabulary-wide logits held at a time


class TorchRunner:
    """One rank that runs a torch model."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        max_rows: int,
        max_tokens: int,
        page_size: int,
        device: str = "cpu",
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._page_size = page_size
        self._device = torch.device(device)
        self._token_ids = np.zeros((max_rows, max_tokens + 1), dtype=np.int64)
        self._num_tokens = np.zeros(max_rows, dtype=np.int64)
        max_pages = pages_needed(max_tokens, page_size)
        self._tables = np.full((max_rows, max_pages), DUMP_PAGE, dtype=np.int64)
        self._num_pages = np.zeros(max_rows, dtype=np.int64)
        self._prompts: dict[int, RowInit] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample the rows that the plan asks for."""
        started = time.perf_counter()
        self._update_rows(plan)
        batch = self._build_batch(plan)
        hidden = self._model.forward(batch, self._attention)
        scored = self._prompt_logprobs(plan, hidden)
        rows = plan.rows[plan.samples]
        logits = self._model.logits(hidden[batch.logit_index]) if len(rows) else None
        forwarded = time.perf_counter()
        result = self._sample(plan, rows, logits, scored)
        sample_s = time.perf_counter() - forwarded
        return replace(result, forward_s=forwarded - started, sample_s=sample_s)

    def close(self) -> None:
        """Nothing was started."""

    # -- row state ---------------------------------------------------------------------------

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.dropped.tolist():
            self._sampler.drop_row(row)
            self._prompts.pop(row, None)
        for init in plan.added:
            row, count = init.row, len(init.token_ids)
            self._token_ids[row, :count] = init.token_ids
            self._num_tokens[row] = count
            self._tables[row] = DUMP_PAGE
            self._num_pages[row] = 0
            self._sampler.add_row(init)
            if init.prompt_logprobs is not None:
                self._prompts[row] = init
        for row, page in zip(plan.page_rows.tolist(), plan.page_ids.tolist(), strict=True):
            self._tables[row, self._num_pages[row]] = page
            self._num_pages[row] += 1

    def _build_batch(self, plan: StepPlan) -> ForwardBatch:
        counts = plan.num_tokens.astype(np.int64)
        starts = plan.starts.astype(np.int64)
        ends = np.cumsum(counts)
        token_rows = np.repeat(plan.rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        pages = self._tables[token_rows, positions // self._page_size]
        num_decodes = int((counts == 1).sum())
        decode_rows = plan.rows[:num_decodes]
        widest = int(self._num_pages[decode_rows].max(initial=1))
        extend_rows = plan.rows[num_decodes:]
        return ForwardBatch(
            token_ids=self._tensor(self._token_ids[token_rows, positions]),
            positions=self._tensor(positions),
            slots=self._tensor(pages * self._page_size + positions % self._page_size),
            num_decodes=num_decodes,
            decode_tables=self._tensor(self._tables[decode_rows, :widest]),
            decode_lens=self._tensor(starts[:num_decodes] + 1),
            extend_starts=(num_decodes, *ends[num_decodes:].tolist()),
            extend_lens=tuple((starts + counts)[num_decodes:].tolist()),
            extend_tables=tuple(
                self._tensor(self._tables[row, : self._num_pages[row]]) for row in extend_rows
            ),
            logit_index=self._tensor((ends - 1)[plan.samples]),
        )

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # -- results -----------------------------------------------------------------------------

    def _sample(
        self,
        plan: StepPlan,
        rows: IntArray,
        logits: Tensor | None,
        scored: dict[int, LogprobRows],
    ) -> StepResult:
        if logits is None:
            empty = np.empty(0, dtype=np.int64)
            return StepResult(
                step_id=plan.step_id, rows=rows, token_ids=empty, prompt_logprobs=scored
            )
        sampled = self._sampler.sample(logits, rows)
        self._token_ids[rows, self._num_tokens[rows]] = sampled.token_ids
        self._num_tokens[rows] += 1
        return StepResult(
            step_id=plan.step_id,
            rows=rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=scored,
            bad_rows=dict.fromkeys(sampled.bad_rows, "the model's logits were not finite"),
        )

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> dict[int, LogprobRows]:
        """Score the prompt tokens that this step's positions predict, for rows that asked."""
        scored: dict[int, LogprobRows] = {}
        if not self._prompts:
            return scored
        ends = np.cumsum(plan.num_tokens)
        for place, row in enumerate(plan.rows.tolist()):
            init = self._prompts.get(row)
            if init is None or init.prompt_logprobs is None:
                continue
            start = int(plan.starts[place])
            count = min(int(plan.num_tokens[place]), init.num_prompt_tokens - 1 - start)
            if count <= 0:
                continue
            begin = int(ends[place] - plan.num_tokens[place])
            targets = init.token_ids[start + 1 : start + 1 + count]
            scored[row] = self._score(hidden[begin : begin + count], targets, init.prompt_logprobs)
        return scored

    def _score(
        self, hidden: Tensor, targets: np.ndarray[tuple[int], np.dtype[np.int64]], top: int
    ) -> LogprobRows:
        step = PROMPT_LOGPROB_ROWS
        return concat_logprobs(
            [
                prompt_logprobs(
                    self._model.logits(hidden[at : at + step]),
                    self._tensor(targets[at : at + step]),
                    top,
                )
                for at in range(0, len(targets), step)
            ]
        )
