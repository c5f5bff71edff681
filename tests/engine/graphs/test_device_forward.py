"""The pass of a device that works by itself, against torch operations one by one.

A CPU stands for the device: everything but the time at which things happen is the same.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from remora.engine.embeddings import PromptEmbeddings
from remora.engine.runner.device import make_forward
from remora.engine.runner.device_memory import largest_step
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import Requests, Rerun, run
from tests.engine.loaded import load_f32
from tests.thinned import thinned

LENGTHS = [1, 3, 9, 17, 30, 5, 12]


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


def prompts(seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    shared = [numbers.randrange(10, 250) for _ in range(8)]
    return [
        (shared + [numbers.randrange(10, 250) for _ in range(length)])[:length]
        for length in LENGTHS
    ]


def make_requests(**changes: Any) -> Requests:
    values: dict[str, Any] = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True} | changes
    params = SamplingParams(**values)
    return {f"r{number}": (prompt, params) for number, prompt in enumerate(prompts())}


ASKED: dict[str, Requests] = {
    "greedy": make_requests(),
    "drawn": make_requests(temperature=1.3, top_k=20, top_p=0.9, seed=7),
    "several": make_requests(temperature=1.0, seed=3, n=3, max_tokens=6),
    "penalised": make_requests(repetition_penalty=1.7, frequency_penalty=0.5, min_tokens=3),
    "restricted": make_requests(allowed_token_ids=(11, 12, 13, 14), temperature=1.0, seed=1),
    "stopped": make_requests(
        stop_token_ids=tuple(range(0, 256, 9)), ignore_eos=False, temperature=1.0, seed=5
    ),
    "bad words": make_requests(bad_words_ids=((3,), (5, 6)), temperature=1.0, seed=4),
    "scored": make_requests(logprobs=3, prompt_logprobs=2),
    "shown": make_requests(hidden_states=True, stop_token_ids=tuple(range(0, 256, 9))),
    "mixed": {
        name: (prompt, params)
        for number, (name, (prompt, _)) in enumerate(make_requests().items())
        for params in [
            [
                SamplingParams(max_tokens=5 + number, temperature=0.0),
                SamplingParams(max_tokens=9, temperature=0.8, seed=number, presence_penalty=1.0),
                SamplingParams(max_tokens=9, temperature=0.8, seed=number, logprobs=1),
            ][number % 3]
        ]
    },
}


@pytest.mark.parametrize(
    ("name", "recorded", "overlap"), thinned(product(ASKED, (False, True), (False, True)), 3)
)
def test_outputs_are_those_of_operations_one_by_one(
    name: str, recorded: bool, overlap: bool, llama: Path
) -> None:
    expected = run(llama, ASKED[name], forward="eager")
    graph_runner = Rerun() if recorded else None

    got = run(llama, ASKED[name], graph_runner=graph_runner, overlap=overlap)

    assert got.token_ids() == expected.token_ids()
    assert got.ends() == expected.ends()
    for key, values in expected.logprobs().items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-4)
    for key, states in expected.hidden_states().items():
        assert (states is None) == (name != "shown")
        if states is not None:
            assert got.hidden_states()[key] == pytest.approx(states, abs=1e-4)
    if graph_runner is not None:
        assert graph_runner.num_captured == 3  # for 1, 2 and 4 rows
        assert graph_runner.num_replayed > 10


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
def test_given_embeddings_run_between_recorded_steps(overlap: bool, llama: Path) -> None:
    asked = make_requests()
    table = load_f32(llama).embedding.weight
    given = {
        name: (PromptEmbeddings(table[prompt].numpy()) if number % 2 else prompt, params)
        for number, (name, (prompt, params)) in enumerate(asked.items())
    }
    graph_runner = Rerun()

    expected = run(llama, asked, forward="eager")
    got = run(
        llama,
        given,
        graph_runner=graph_runner,
        overlap=overlap,
        embedding_size=table.shape[1],
    )

    assert got.token_ids() == expected.token_ids()
    assert graph_runner.num_replayed > 10


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
def test_rows_that_are_preempted_give_the_same_tokens(overlap: bool, llama: Path) -> None:
    requests = make_requests(max_tokens=24, temperature=0.9, seed=11, ignore_eos=False)

    expected = run(llama, requests, forward="eager")
    got = run(
        llama,
        requests,
        graph_runner=Rerun(),
        overlap=overlap,
        num_pages=20,
        conservativeness=0.1,
        max_model_len=80,
    )

    assert got.num_preemptions > 0
    assert got.token_ids() == expected.token_ids()


@pytest.mark.parametrize("step", [0, 1, 2, 5, 9])
def test_a_request_that_is_aborted_leaves_the_others_alone(step: int, llama: Path) -> None:
    requests = make_requests(temperature=0.9, seed=2)

    expected = run(llama, requests, forward="eager").token_ids()
    got = run(llama, requests, graph_runner=Rerun(), overlap=True, aborts={step: "r1"}).token_ids()

    aborted = got.pop(("r1", 0))
    assert aborted == expected.pop(("r1", 0))[: len(aborted)]
    assert got == expected


def test_steps_of_all_sizes_leave_their_results_in_the_same_memory(llama: Path) -> None:
    model = load_f32(llama)
    plan = make_plan(max_running_requests=4)
    forward = make_forward(model, plan, plan.num_pages)
    forward.capture(Rerun(), (1, 2, 4))

    made = [forward.forward(largest_step(plan, rows)) for rows in (4, 1, 3)]

    assert [len(logits) for logits in made] == [4, 1, 3]
    assert len({logits.data_ptr() for logits in made}) == 1


def test_a_device_of_its_own_holds_what_the_host_brought(llama: Path) -> None:
    """Page tables grow on the device by what each step brings, also beyond one upload."""
    import remora.engine.graphs.device_forward as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_GROWN", 3)
        got = run(llama, make_requests())

    assert got.token_ids() == run(llama, make_requests(), forward="eager").token_ids()
