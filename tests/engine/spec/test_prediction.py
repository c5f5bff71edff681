"""Predicted outputs: drafts follow the client's text, and no prediction changes an output."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.load import parse_args
from remora.engine.launch import build_engine
from remora.engine.sampling.params import SamplingParams
from remora.engine.spec.prediction import PredictionProposer
from remora.engine.types import Namespace, Request
from tests.conftest import TinyCheckpoints
from tests.engine.spec.proposers import GuessingProposer

TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def proposer() -> PredictionProposer:
    """Return one whose other proposer drafts 99."""
    found = PredictionProposer(GuessingProposer(lambda known, limit: [99]))
    found.begin(0, [1, 2, 5], Namespace())
    found.predict(0, TEXT, [5])
    return found


def test_drafts_follow_the_prediction() -> None:
    found = proposer()
    assert found.propose([(0, 3)]) == [[6, 7, 8]]
    found.extend(0, [6, 7])
    assert found.propose([(0, 2)]) == [[8, 9]]
    assert found.predicted == {0}


def test_drafts_go_on_where_the_output_returns_to_the_prediction() -> None:
    found = proposer()
    found.extend(0, [6, 50, 51])
    assert found.propose([(0, 3)]) == [[99]]
    assert found.predicted == set()
    found.extend(0, [10, 11])
    assert found.propose([(0, 9)]) == [[12, 13, 14]]


def test_rows_without_a_prediction_have_the_other_proposers_drafts() -> None:
    found = proposer()
    found.begin(1, [4], Namespace())
    assert found.propose([(1, 2), (0, 1)]) == [[99], [6]]
    found.end(0)
    found.end(1)
    assert found.propose([]) == []


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_outputs_are_those_without_a_prediction(
    tiny_checkpoints: TinyCheckpoints, method: str
) -> None:
    path = str(tiny_checkpoints("llama"))
    keys: dict[str, Any] = {"method": method, "max_drafts": 4, "adaptive": False}
    if method == "draft":
        keys["draft_model"] = path
    engine = build_engine(
        parse_args(
            {
                "model": {"path": path, "dtype": "bfloat16"},
                "engine": {"kv_tokens": 2048, "num_threads": 1, "cpu_kernels": "native"},
                "speculation": keys,
            }
        ),
        show_progress=False,
    ).engine

    def run(prediction: list[int], **sampling: Any) -> tuple[list[int], tuple[int, int]]:
        engine.flush_cache()
        params = SamplingParams(**({"max_tokens": 30, "temperature": 0.0} | sampling))
        engine.add(
            Request(
                request_id="a", prompt_ids=[7, 8, 9], sampling=params, prediction_ids=prediction
            )
        )
        tokens: list[int] = []
        while True:
            for output in engine.step():
                tokens += output.token_ids
                if output.finish_reason is not None:
                    engine.check_integrity()
                    return tokens, output.predicted

    plain, none = run([], ignore_eos=True)
    assert none == (0, 0)
    assert run(plain, ignore_eos=True) == (plain, (23, 0))  # the steps have 4, 4, 4, 4, 4 and 3
    half = [*plain[:12], *[3] * 5, *plain[12:]]
    found, (right, wrong) = run(half, ignore_eos=True)
    assert found == plain
    assert right > 10
    assert wrong > 0
    found, (right, wrong) = run([4] * 40, ignore_eos=True)
    assert found == plain
    assert right == 0
    stopped, (right, _) = run(plain, stop_token_ids=(plain[20],), ignore_eos=True)
    assert stopped == plain[: plain.index(plain[20]) + 1]
    assert right < len(stopped)
    assert run(plain, ignore_eos=True, max_drafts=0) == (plain, (0, 0))
    engine.close()
