"""Tokens chosen within a captured step are bit for bit those chosen after its logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.graphs.device_stream import stream_of
from remora.engine.runner.device import make_forward
from remora.engine.runner.device_memory import largest_step
from remora.engine.runner.inputs import StepInputs
from remora.engine.sampling.sampler import Sampler
from remora.engine.types import RowInit, SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import CPU, Rerun
from tests.engine.loaded import load_f32

MAX_ROWS = 6
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "top_k": 3, "seed": 2},
    {"temperature": 1.0, "top_p": 0.7, "seed": 3},
    {"temperature": 0.9, "min_p": 0.1, "seed": 4},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5},
]
NEEDS_MORE: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"presence_penalty": 0.5},
    {"logit_bias": {7: 3.0}},
    {"min_tokens": 2, "stop_token_ids": (5,)},
    {"bad_words_ids": ((3,),)},
    {"allowed_token_ids": (11, 12, 13)},
]


@pytest.fixture(scope="module")
def forward(tiny_checkpoints: TinyCheckpoints) -> DeviceForward:
    plan = make_plan(max_running_requests=MAX_ROWS)
    made = make_forward(load_f32(path_of(tiny_checkpoints)), plan, plan.num_pages)
    made.capture(Rerun(), (1, 2, 4, MAX_ROWS))
    return made


def path_of(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


def make_sampler(forward: DeviceForward, params: list[dict[str, Any]]) -> Sampler:
    sampler = Sampler(
        max_rows=MAX_ROWS,
        vocab_size=forward._model.vocab_size,
        eos_token_ids=(0,),
        token_sampler=DeviceTokenSampler(stream_of(CPU), MAX_ROWS, forward.sampling),
    )
    for row, sampling in enumerate(params):
        sampler.add_row(
            RowInit(
                row=row,
                token_ids=np.array([row + 1, 9, 2 * row]),
                num_prompt_tokens=3,
                seed=sampling.get("seed", 0),
                sampling=SamplingParams(**sampling),
            )
        )
    return sampler


def step_of(num_rows: int) -> StepInputs:
    return largest_step(make_plan(max_running_requests=MAX_ROWS), num_rows)


def tokens_of(
    forward: DeviceForward, sampler: Sampler, num_rows: int, *, prepares: bool
) -> list[list[int]]:
    """Run three steps of these rows; parameters that are not prepared are sampled afterwards."""
    rows, found = np.arange(num_rows, dtype=np.int32), []
    with torch.inference_mode():
        for _ in range(3):
            if prepares:
                sampler.prepare(rows)
            pending = sampler.choose(forward.forward(step_of(num_rows)), rows)
            forward.set_last_tokens(pending.sampled.token_ids)
            found.append(sampler.finish(pending).token_ids.tolist())
    return found


def counts_of(forward: DeviceForward) -> tuple[int, int]:
    return forward.sampling.num_captured, forward.sampling.num_launched


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 6])
def test_plain_rows_get_the_same_tokens_in_the_graph(forward: DeviceForward, num_rows: int) -> None:
    params = PLAIN[-num_rows:]
    expected = tokens_of(forward, make_sampler(forward, params), num_rows, prepares=False)
    newest = forward._newest.clone()
    captured, launched = counts_of(forward)

    found = tokens_of(forward, make_sampler(forward, params), num_rows, prepares=True)

    assert found == expected
    assert counts_of(forward) == (captured + 3, launched)
    assert forward._newest[:num_rows].tolist() == found[-1] == newest[:num_rows].tolist()


@pytest.mark.parametrize("more", NEEDS_MORE, ids=lambda more: next(iter(more)))
def test_a_row_that_needs_more_is_sampled_after_the_graph(
    forward: DeviceForward, more: dict[str, Any]
) -> None:
    params = [*PLAIN[:3], {"temperature": 0.7, "seed": 9, **more}]
    expected = tokens_of(forward, make_sampler(forward, params), 4, prepares=False)
    captured, launched = counts_of(forward)
    sampler = make_sampler(forward, params)

    assert tokens_of(forward, sampler, 4, prepares=True) == expected
    assert counts_of(forward) == (captured, launched + 3)
    assert forward._newest[:4].tolist() == expected[-1]
    tokens_of(forward, sampler, 3, prepares=True)  # without that row
    assert counts_of(forward) == (captured + 3, launched + 3)


def test_a_step_of_which_some_rows_have_no_logits_is_sampled_after_the_graph(
    forward: DeviceForward,
) -> None:
    whole = step_of(4)
    rows, some = np.array([1, 3], dtype=np.int32), whole.logit_index[[1, 3]]
    expected = [
        tokens_of(forward, make_sampler(forward, PLAIN), 4, prepares=False)[0][at] for at in rows
    ]
    sampler, (captured, launched) = make_sampler(forward, PLAIN), counts_of(forward)

    sampler.prepare(rows)
    made = sampler.sample(forward.forward(replace(whole, logit_index=some)), rows)

    assert made.token_ids.tolist() == expected
    assert counts_of(forward) == (captured, launched + 1)


def test_tokens_of_a_graph_are_not_those_of_other_logits(forward: DeviceForward) -> None:
    sampler, rows = make_sampler(forward, PLAIN[:1]), np.arange(1, dtype=np.int32)
    other = torch.zeros(1, forward._model.vocab_size)
    other[0, 77] = 1.0

    sampler.prepare(rows)
    forward.forward(step_of(1))

    assert sampler.sample(other, rows).token_ids.tolist() == [77]


def test_faults_within_the_graph_are_told(forward: DeviceForward) -> None:
    sampler, rows = make_sampler(forward, PLAIN[:3]), np.arange(3, dtype=np.int32)
    head = forward._model.head.linear.weight  # type: ignore[attr-defined]
    with torch.inference_mode():
        kept = head[9].clone()
        head[9] = torch.nan

        sampler.prepare(rows)
        made = sampler.sample(forward.forward(step_of(3)), rows)

        head[9] = kept
    assert made.bad_rows.keys() == {0, 1, 2}
    assert forward.sampling.tokens is not None
    newest = forward._newest[:3].tolist()
    assert all(0 <= token_id < forward._model.vocab_size for token_id in newest)
