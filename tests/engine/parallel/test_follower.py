"""Another rank computes on the same inputs as rank 0, step after step, whatever happens to rows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remora.configs.errors import EngineError
from remora.engine.engine import Engine
from remora.engine.launch import make_table
from remora.engine.parallel.channel import Address, Channel, Listener
from remora.engine.parallel.follower import Follower
from remora.engine.parallel.followers import ChannelFollowers
from remora.engine.parallel.group import Alone
from remora.engine.runner.inputs import StepInputs
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.sampling.token_sampler import HostTokenSampler
from remora.engine.types import Request, SamplingParams
from tests.engine.fakes import VOCAB, make_plan

PLAN = make_plan(num_pages=14, conservativeness=0.01)  # so that rows are preempted


@dataclass
class RecordingForward:
    """Logits that depend on each token and its place; remembers what it was asked."""

    calls: list[Any] = field(default_factory=list)
    closed: bool = False
    fail: Callable[[], None] = lambda: None

    def forward(self, inputs: StepInputs) -> Tensor:
        self.fail()
        tables = inputs.tables[inputs.rows]
        self.calls.append(
            [
                inputs.token_ids.tolist(),
                inputs.positions.tolist(),
                inputs.slots.tolist(),
                inputs.starts.tolist(),
                inputs.lengths.tolist(),
                tables.tolist(),
                inputs.logit_index.tolist(),
                inputs.num_decodes,
            ]
        )
        at = inputs.logit_index
        return self.rows(inputs.token_ids[at] * 31 + inputs.positions[at] * 7)

    def logits(self, first: int, last: int) -> Tensor:
        self.calls.append((first, last))
        return self.rows(np.arange(first, last))

    def hidden(self, first: int, last: int) -> Tensor:
        raise NotImplementedError

    def rows(self, seeds: Any) -> Tensor:
        columns = np.arange(VOCAB)
        return torch.tensor(np.sin(seeds[:, None] * 3.7 + columns * 1.3), dtype=torch.float32)

    def close(self) -> None:
        self.closed = True


@dataclass
class Ranks:
    """An engine with one follower in a thread."""

    engine: Engine
    rank_0: RecordingForward
    rank_1: RecordingForward
    followers: ChannelFollowers
    thread: threading.Thread
    errors: queue.Queue[Exception]


@contextmanager
def make_ranks() -> Iterator[Ranks]:
    from remora.kernels import sampling as sampling_kernels

    rank_0, rank_1 = RecordingForward(), RecordingForward()
    errors: queue.Queue[Exception] = queue.Queue()
    with closing(Listener()) as listener:
        thread = threading.Thread(target=follow, args=(listener.address, rank_1, errors))
        thread.start()
        followers = ChannelFollowers(listener.accept(2, 10.0))
    sampler = Sampler(
        max_rows=PLAN.max_running_requests,
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        token_sampler=HostTokenSampler(sampling_kernels),
    )
    runner = LocalRunner(rank_0, sampler, make_table(PLAN), followers)
    engine = Engine(PLAN, runner, eos_token_ids=(0,), vocab_size=VOCAB)
    try:
        yield Ranks(engine, rank_0, rank_1, followers, thread, errors)
    finally:
        engine.close()
        thread.join(10)
        assert not thread.is_alive()


def follow(address: Address, forward: RecordingForward, errors: queue.Queue[Exception]) -> None:
    channel = Channel.connect(address, 1, 10.0)
    try:
        Follower(forward, make_table(PLAN), channel, Alone()).run()
    except Exception as error:
        errors.put(error)


def make_request(number: int, **sampling: Any) -> Request:
    """A request of full length, which admission cannot know."""
    endless = {"max_tokens": 30, "temperature": 1.0, "seed": number, "logit_bias": {0: -1000.0}}
    return Request(
        request_id=f"r{number}",
        prompt_ids=[(number * 13 + at * 5) % (VOCAB - 1) + 1 for at in range(3 + 4 * number)],
        sampling=SamplingParams(**(endless | sampling)),  # type: ignore[arg-type]
    )


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_follower_computes_what_rank_0_computes() -> None:
    with make_ranks() as ranks:
        for number in range(6):
            ranks.engine.add(make_request(number, n=1 + number % 2))
            ranks.engine.step()
        ranks.engine.abort("r1")
        run(ranks.engine)
        preemptions = ranks.engine.stats().preemptions_total
    assert preemptions > 0, "rows were to start again"
    assert len(ranks.rank_0.calls) > 20
    assert ranks.rank_1.calls == ranks.rank_0.calls


def test_questions_for_logits_of_a_prompt_reach_the_follower() -> None:
    with make_ranks() as ranks:
        ranks.engine.add(make_request(2, prompt_logprobs=1))
        run(ranks.engine)
    assert any(isinstance(call, tuple) for call in ranks.rank_1.calls)
    assert ranks.rank_1.calls == ranks.rank_0.calls


def test_a_follower_ends_and_closes_when_rank_0_does() -> None:
    with make_ranks() as ranks:
        pass
    assert ranks.rank_1.closed
    assert ranks.errors.empty()


def test_what_fails_in_a_follower_is_raised_by_rank_0() -> None:
    def boom() -> None:
        raise MemoryError("no room for a batch of 7")

    with make_ranks() as ranks:
        ranks.rank_1.fail = boom
        failures: queue.Queue[EngineError] = queue.Queue()
        ranks.followers.on_failure(failures.put)
        ranks.engine.add(make_request(1))
        ranks.engine.step()
        assert "Rank 1 has failed: no room for a batch of 7" in str(failures.get(timeout=10))
        with pytest.raises(EngineError, match="no room for a batch of 7"):
            ranks.engine.step()
    assert isinstance(ranks.errors.get(timeout=10), MemoryError)
