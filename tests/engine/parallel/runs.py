"""Whole engines on ranks that are threads: what requests come to, and by which logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remora.engine.embeddings import PromptEmbeddings
from remora.engine.engine import Engine
from remora.engine.launch import make_table
from remora.engine.models.checkpoint import read_config
from remora.engine.runner.inputs import StepInputs
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.types import SamplingParams
from tests.engine.fakes import make_plan, make_request
from tests.engine.parallel.ranks import ranks_forward

Requests = Mapping[str, tuple[list[int] | PromptEmbeddings, SamplingParams]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What requests came to: ids, prompt log-probabilities, hidden states; logits by step."""

    token_ids: dict[str, list[int]]
    prompt_logprobs: dict[str, list[float]]
    steps: list[Tensor]
    hidden_states: dict[str, Any]

    def margin(self) -> float:
        """Return by how much the best logit led the next where it led least."""
        best = torch.cat([logits.topk(2).values for logits in self.steps])
        return float((best[:, 0] - best[:, 1]).min())


def run(path: Path, requests: Requests, **plan_changes: Any) -> Run:
    """Let an engine of the plan's ranks run the requests, in chunks, and decode beside prefill."""
    plan = make_plan(
        page_size=16,
        num_pages=64,
        max_model_len=256,
        max_step_tokens=40,
        prefill_chunk_tokens=24,
        **plan_changes,
    )
    rows, vocab_size = plan.max_running_requests, read_config(path).vocab_size
    table = make_table(plan)
    token_ids: dict[str, list[int]] = {name: [] for name in requests}
    scored: dict[str, list[float]] = {name: [] for name in requests}
    shown: dict[str, Any] = {}
    with ranks_forward(path, plan, table) as forward:
        steps: list[Tensor] = []
        compute = forward.forward

        def recorded(inputs: StepInputs) -> Tensor:
            steps.append(compute(inputs).clone())
            return steps[-1].clone()

        forward.forward = recorded  # type: ignore[method-assign]
        sampler = Sampler(max_rows=rows, vocab_size=vocab_size, eos_token_ids=())
        runner = LocalRunner(forward, sampler, table)
        engine = Engine(plan, runner, eos_token_ids=(), vocab_size=vocab_size)
        for name, (prompt, params) in requests.items():
            engine.add(make_request(name, prompt, params))
        while engine.has_work:
            for output in engine.step():
                token_ids[output.request_id].extend(output.token_ids)
                shown[output.request_id] = output.hidden_states
                for part in output.prompt_logprobs:
                    scored[output.request_id].extend(part.logprobs.tolist())
        engine.close()
    return Run(token_ids=token_ids, prompt_logprobs=scored, steps=steps, hidden_states=shown)
