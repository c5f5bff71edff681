"""Drafts where a device computes: outputs are those without, and graphs hold verified drafts.

A CPU stands for the device; attention is Triton's backend, which computes with torch there.
"""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.planning.device_plan import DevicePlan
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.graphs.device_forward import DeviceForward
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import Rerun, Run, run
from tests.engine.graphs.test_device_forward import ASKED, make_requests
from tests.engine.spec.proposers import replaying

CAPTURED = DevicePlan(graph_sizes=(1, 2, 4), graph_prompt_sizes=(2, 8, 16, 24))
ROOM: dict[str, Any] = {"max_running_requests": 4, "max_step_tokens": 24}
ON_DEVICE: dict[str, Any] = {**ROOM, "make_attention": TritonAttention, "how": CAPTURED}


def texts(made: Run, name: str) -> list[list[int]]:
    return [[*ASKED[name][key][0], *token_ids] for (key, _), token_ids in made.token_ids().items()]


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("name", ASKED)
def test_outputs_are_those_without_drafts(
    name: str,
    recorded: bool,
    tiny_checkpoints: TinyCheckpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoints("llama")
    expected = run(path, ASKED[name], forward="eager", **ROOM)
    if recorded:  # also steps with drafts
        monkeypatch.delattr(DeviceForward, "_launch")

    got = run(
        path,
        ASKED[name],
        guess=replaying(texts(expected, name), every=5),
        graph_runner=Rerun() if recorded else None,
        **ON_DEVICE,
    )

    assert got.token_ids() == expected.token_ids()
    assert got.ends() == expected.ends()
    for key, values in expected.logprobs().items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-4)
    assert 0 < got.num_right < got.num_drafts
    assert got.num_steps < expected.num_steps


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("pages", [64, 20], ids=["roomy", "preempted"])
def test_a_model_on_a_device_that_drafts_for_itself_is_right(
    pages: int, recorded: bool, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    requests = make_requests(max_tokens=24, temperature=0.9, seed=11, ignore_eos=False)
    few: dict[str, Any] = {"num_pages": pages, "conservativeness": 0.1, "max_model_len": 80}
    expected = run(path, requests, forward="eager", **ROOM)

    graph_runner = Rerun() if recorded else None
    got = run(path, requests, draft=path, graph_runner=graph_runner, **ON_DEVICE, **few)

    assert got.token_ids() == expected.token_ids()
    assert got.num_right == got.num_drafts > 30
    assert bool(got.num_preemptions) == (pages == 20)


def test_another_model_drafts_on_a_device(tiny_checkpoints: TinyCheckpoints) -> None:
    path, other = tiny_checkpoints("llama"), tiny_checkpoints("qwen2")

    expected = run(path, ASKED["mixed"], forward="eager", **ROOM)
    got = run(path, ASKED["mixed"], draft=other, graph_runner=Rerun(), **ON_DEVICE)

    assert got.token_ids() == expected.token_ids()
    assert got.num_drafts > 30
