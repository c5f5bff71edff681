"""Chains of drafts on a device: the drafts of the host, for which the host waits once a chain.

A CPU stands for the device. `LateStream` copies to the host when it is waited for, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.configs.planning.device_plan import DevicePlan
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.graphs.device_stream import HostStream
from remora.engine.runner.inputs import IN_FLIGHT, StepInputs
from remora.engine.spec.draft_chain import DeviceChain, DraftChain, HostChain
from remora.engine.spec.draft_model import DraftModel
from remora.engine.spec.stop_tokens import StopTokens
from remora.engine.types import RowInit, SamplingParams, StepPlan
from tests.conftest import TinyCheckpoints
from tests.engine.graphs import device_runs
from tests.engine.graphs.device_runs import MAX_DRAFTS, Requests, Rerun, run
from tests.engine.graphs.test_device_forward import ASKED, make_requests

CPU = torch.device("cpu")
CAPTURED = DevicePlan(graph_sizes=(1, 2, 4), graph_prompt_sizes=(2, 8, 16, 24))
ON_DEVICE: dict[str, Any] = {
    "max_running_requests": 4,
    "max_step_tokens": 24,
    "make_attention": TritonAttention,
    "how": CAPTURED,
}


class LateStream(HostStream):
    """A device whose results reach the host when an event after their copy is waited for.

    num_waits:  waits for results
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_waits = 0
        self._pinned: set[int] = set()
        self._late: list[tuple[Tensor, Tensor]] = []

    def pinned(self, num_bytes: int) -> Tensor:
        made = super().pinned(num_bytes)
        self._pinned.add(made.untyped_storage().data_ptr())
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.untyped_storage().data_ptr() in self._pinned:
            self._late.append((target, source.clone()))
        else:
            target.copy_(source)

    def event(self) -> LateEvent:
        return LateEvent(self)

    def arrive(self, before: int) -> None:
        arriving, self._late = self._late[:before], self._late[before:]
        for target, source in arriving:
            target.copy_(source)
        self.num_waits += bool(arriving)


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream, self._before = stream, 0

    def record(self) -> None:
        self._before = len(self._stream._late)

    def synchronize(self) -> None:
        self._stream.arrive(self._before)
        self._before = 0


def chains_of(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]) -> list[tuple[Any, ...]]:
    """Return a list that gets each later chain: counts of drafts, drafts, and what `count` grew."""
    chains: list[tuple[Any, ...]] = []
    complete = DraftModel.complete

    def watched(self: DraftModel, plan: StepPlan) -> StepPlan:
        before = count()
        made = complete(self, plan)
        if made is not plan:
            num_drafts = tuple(plan.num_drafts.tolist())
            chains.append((num_drafts, made.draft_ids.tolist(), count() - before))
        return made

    monkeypatch.setattr(DraftModel, "complete", watched)
    return chains


def uneven(requests: Requests) -> Requests:
    """Limit the drafts of each request to another number."""
    return {
        name: (prompt, replace(params, max_drafts=1 + number % MAX_DRAFTS))
        for number, (name, (prompt, params)) in enumerate(requests.items())
    }


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_the_host_waits_once_for_a_chain(
    recorded: bool, tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LateStream()
    monkeypatch.setattr(device_runs, "stream_of", lambda device: stream)
    chains = chains_of(monkeypatch, lambda: stream.num_waits)
    unknown: list[bool] = []
    forward = DeviceForward.forward

    def watched(self: DeviceForward, inputs: StepInputs) -> Tensor:
        if (inputs.token_ids == IN_FLIGHT).any():
            unknown.append(bool((inputs.token_ids == IN_FLIGHT).all()))
        return forward(self, inputs)

    monkeypatch.setattr(DeviceForward, "forward", watched)
    requests = uneven(make_requests(max_tokens=24, temperature=0.9, seed=11))

    path = tiny_checkpoints("llama")
    got = run(path, requests, draft=path, graph_runner=Rerun() if recorded else None, **ON_DEVICE)

    assert got.num_drafts > 50
    assert [waits for *_, waits in chains] == [1] * len(chains)
    most = [max(num_drafts) for num_drafts, *_ in chains]
    assert max(most) == MAX_DRAFTS
    assert unknown == [True] * sum(each - 1 for each in most)  # passes after the first of a chain


@pytest.mark.parametrize(
    "recorded",
    [pytest.param(True, id="recorded"), pytest.param(False, marks=pytest.mark.slow, id="launched")],
)
@pytest.mark.parametrize("drafting", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["greedy", "stopped", "mixed"])
def test_drafts_are_those_that_the_host_waits_for(
    name: str,
    drafting: str,
    recorded: bool,
    tiny_checkpoints: TinyCheckpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, other = tiny_checkpoints("llama"), tiny_checkpoints(drafting)
    requests = uneven(ASKED[name])
    chains = chains_of(monkeypatch, lambda: 0)

    def answers() -> Any:
        graph_runner = Rerun() if recorded else None
        return run(path, requests, draft=other, graph_runner=graph_runner, **ON_DEVICE).token_ids()

    got, made = answers(), list(chains)
    chains.clear()
    monkeypatch.setattr(device_runs, "DeviceChain", lambda stops, *_, **__: HostChain(stops))
    assert answers() == got
    assert made == chains
    assert sum(sum(num_drafts) for num_drafts, *_ in made) > 30
    assert any(len({*num_drafts} - {0}) > 1 for num_drafts, *_ in made)


class Newest:
    """Keeps what a pass would read."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def set_last_tokens(self, token_ids: Tensor) -> None:
        self.token_ids = token_ids.tolist()


def started(row: int, stop_token_ids: list[int]) -> StepPlan:
    init = RowInit(
        row=row,
        token_ids=np.zeros(1, np.int64),
        num_prompt_tokens=1,
        seed=0,
        sampling=SamplingParams(stop_token_ids=tuple(stop_token_ids)),
    )
    none = np.empty(0, np.int32)
    return StepPlan(
        step_id=0,
        added=(init,),
        dropped=none,
        page_rows=none,
        page_ids=none,
        rows=none,
        starts=none,
        num_tokens=none,
        samples=np.empty(0, np.bool_),
    )


@given(
    vocab_size=st.integers(2, 9),
    eos_token_ids=st.sets(st.integers(0, 8)),
    stops=st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=4),
    data=st.data(),
)
def test_no_draft_ends_its_row(
    vocab_size: int, eos_token_ids: set[int], stops: list[set[int]], data: st.DataObject
) -> None:
    num_rows, newest = len(stops), Newest()
    known = StopTokens(eos_token_ids, vocab_size)
    for row, own in enumerate(stops):
        known.begin(started(row, sorted(own)))
    most_id = data.draw(st.integers(1, vocab_size))
    on_device = DeviceChain(known, newest, LateStream(), most_id=most_id)
    chains: tuple[DraftChain, ...] = (HostChain(known), on_device)
    rows = np.array(data.draw(st.permutations(range(num_rows))), np.int32)
    counts = np.array(data.draw(st.lists(st.integers(1, 3), min_size=num_rows, max_size=num_rows)))
    for chain in chains:
        chain.begin(rows)

    drawn = np.full((num_rows, counts.max()), -1)
    for ahead in range(counts.max()):
        at = (counts > ahead).nonzero()[0]
        ids = data.draw(
            st.lists(st.integers(0, vocab_size - 1), min_size=len(at), max_size=len(at))
        )
        drawn[at, ahead] = ids
        named = [chain.add(at, torch.tensor(ids)).tolist() for chain in chains]
        assert named[1] == [IN_FLIGHT] * len(at)
        assert newest.token_ids == [min(each, most_id) for each in named[0]]

    drafts = chains[0].take()
    assert chains[1].take().tolist() == drafts.tolist()
    for place, row in enumerate(rows.tolist()):
        ending = (stops[row] | eos_token_ids) & {*range(vocab_size)}
        for ahead in range(counts[place]):
            token_id, draft = int(drawn[place, ahead]), int(drafts[place, ahead])
            if token_id not in ending:
                assert draft == token_id
            elif len(ending) < vocab_size:
                assert draft not in ending
                skipped = range(token_id, token_id + (draft - token_id) % vocab_size)
                assert ending.issuperset(each % vocab_size for each in skipped)
