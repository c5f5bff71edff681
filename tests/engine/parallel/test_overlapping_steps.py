"""Tokens on their way to followers while steps overlap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from remora.engine.parallel.follower import Follower
from remora.engine.parallel.followers import NoFollowers
from remora.engine.parallel.group import ALONE
from remora.engine.parallel.wire import Step
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.sampling.token_sampler import HostTokenSampler
from remora.engine.types import IntArray, RowInit, SamplingParams, StepPlan, TokenArray
from remora.kernels import sampling as sampling_kernels
from tests.engine.fakes import VOCAB
from tests.engine.parallel.test_follower import RecordingForward

NONE = np.empty(0, np.int32)


@dataclass
class Sent(NoFollowers):
    """Followers that record which tokens they are sent before each step."""

    tokens: list[list[tuple[int, int]]] = field(default_factory=list)
    all: list[tuple[StepPlan, IntArray, TokenArray]] = field(default_factory=list)

    def step(self, plan: StepPlan, rows: IntArray, token_ids: TokenArray) -> None:
        self.tokens.append(list(zip(rows.tolist(), token_ids.tolist(), strict=True)))
        self.all.append((plan, rows, token_ids))


def make_table() -> InputBatch:
    return InputBatch(max_rows=2, max_tokens=16, page_size=16)


def make_plan(step_id: int, starts: list[int], *, restarts: tuple[int, ...] = ()) -> StepPlan:
    """Return a step of rows 0 and 1; the first one, and `restarts`, add rows of two tokens."""
    added = (0, 1) if step_id == 0 else restarts
    return StepPlan(
        step_id=step_id,
        added=tuple(
            RowInit(
                row=row,
                token_ids=np.array([3 + row, 5 + row]),
                num_prompt_tokens=2,
                seed=0,
                sampling=SamplingParams(temperature=0.0),
            )
            for row in added
        ),
        dropped=NONE,
        page_rows=np.array(added, np.int32),
        page_ids=np.array([1 + row for row in added], np.int32),
        rows=np.array([0, 1], np.int32),
        starts=np.array(starts, np.int32),
        num_tokens=np.array([2 if start == 0 else 1 for start in starts], np.int32),
        samples=np.array([True, True]),
    )


def make_runner() -> tuple[LocalRunner, Sent]:
    sampler = Sampler(
        max_rows=2,
        vocab_size=VOCAB,
        eos_token_ids=(),
        token_sampler=HostTokenSampler(sampling_kernels),
    )
    followers = Sent()
    return LocalRunner(RecordingForward(), sampler, make_table(), followers), followers


def test_tokens_of_all_steps_that_finished_are_sent_in_order() -> None:
    runner, followers = make_runner()
    results = []
    runner.begin(make_plan(0, [0, 0]))
    runner.sample()
    runner.begin(make_plan(1, [2, 2]))
    results.append(runner.finish())
    runner.sample()
    results.append(runner.finish())
    runner.begin(make_plan(2, [4, 4]))

    first, second = (result.token_ids.tolist() for result in results)
    assert followers.tokens == [[], [], [*enumerate(first), *enumerate(second)]]


def test_tokens_of_rows_that_have_restarted_since_are_not_sent() -> None:
    runner, followers = make_runner()
    runner.begin(make_plan(0, [0, 0]))
    runner.sample()
    runner.begin(make_plan(1, [0, 2], restarts=(0,)))
    result = runner.finish()
    runner.sample()
    runner.begin(make_plan(2, [2, 3]))

    assert followers.tokens[2] == [(1, int(result.token_ids[1]))]


@dataclass
class Inputs(RecordingForward):
    """A forward pass that records the token ids and positions of each step."""

    steps: list[Any] = field(default_factory=list)

    def forward(self, inputs: Any) -> torch.Tensor:
        self.steps.append((inputs.token_ids.tolist(), inputs.positions.tolist()))
        return super().forward(inputs)


def test_a_follower_appends_several_tokens_of_a_row_in_order() -> None:
    forward = Inputs()
    follower = Follower(forward, make_table(), cast("Any", None), ALONE)
    none = np.empty(0, np.int64)

    follower._step(Step(make_plan(0, [0, 0]), NONE, none))
    tokens = np.array([11, 21, 12, 22], np.int64)
    follower._step(Step(make_plan(1, [3, 3]), np.array([0, 1, 0, 1], np.int32), tokens))

    assert forward.steps[1] == ([12, 22], [3, 3])
