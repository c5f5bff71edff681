"""Engines with quantised weights in their layers on triton's kernels, which are interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import Rerun, Run, run
from tests.engine.models.test_parity import make_prompts
from tests.engine.weights.formats.checkpoints import pack_gpt_oss, quantise
from tests.engine.weights.formats.writers import BLOCKS, SAMPLES, Sample, small
from tests.kernels.gpu.devices import interpreted_only
from tests.kernels.gpu.interpreter import quicken

pytestmark = interpreted_only

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=0)
REQUESTS = {str(number): (ids, GREEDY) for number, ids in enumerate(make_prompts([2, 9]))}
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1}
# Weights of four bits are multiplied with rows as they are; the others with rows of 8 bits.
EXACT, ROUNDED = 1e-4, 0.1
CASES: dict[str, tuple[Sample, float]] = {
    "awq": (SAMPLES["awq"], EXACT),
    "gptq-act-order": (SAMPLES["gptq-act-order"], EXACT),
    "gptq-8-bits": (SAMPLES["gptq-8-bits"], EXACT),
    "ct-mxfp4": (SAMPLES["ct-mxfp4"], EXACT),
    "modelopt-nvfp4": (SAMPLES["modelopt-nvfp4"], EXACT),
    "ct-int8": (SAMPLES["ct-int8"], ROUNDED),
    "fp8-tensor": (SAMPLES["fp8-tensor"], ROUNDED),
    "ct-float8": (SAMPLES["ct-float8"], ROUNDED),
    "fp8-blocks": (BLOCKS, ROUNDED),
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let products with quantised weights on a CPU be triton's until `monkeypatch` undoes it."""
    pytest.importorskip("triton")
    quicken(monkeypatch)
    for module in ("moe", "moe_routing", "quantised.linear_quant"):
        monkeypatch.setattr(f"remora.kernels.{module}.by_triton", lambda device: True)
    with np.errstate(all="ignore"):
        yield monkeypatch


def logprobs(made: Run) -> torch.Tensor:
    return torch.tensor([value for values in made.logprobs().values() for value in values])


# One of each way to multiply, and one that permutes its columns.
OF_EACH_WAY = ("gptq-act-order", "ct-mxfp4", "ct-int8", "fp8-blocks")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OF_EACH_WAY else [pytest.mark.slow]) for name in CASES],
)
def test_tokens_are_those_of_the_torch_reference(
    name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path, interpreted: pytest.MonkeyPatch
) -> None:
    """In chunks and from graphs; log-probabilities are near the dequantised checkpoint's."""
    sample, tolerance = CASES[name]
    path = tiny_checkpoints("llama", **SIZES)
    torch.manual_seed(0)
    endings = tuple(name for name in LINEARS if name not in sample.settings.get("ignore", ()))
    quantised, plain = quantise(path, tmp_path, small(sample), endings)
    graph_runner = Rerun()
    options: dict[str, Any] = {"max_running_requests": 2, "max_step_tokens": 6}

    got = run(quantised, REQUESTS, graph_runner=graph_runner, held="stored", **options)
    interpreted.undo()

    same = run(quantised, REQUESTS, forward="eager", held="stored", **options)
    assert graph_runner.num_replayed > 0
    assert got.token_ids() == same.token_ids()
    assert logprobs(got) == pytest.approx(logprobs(same), abs=1e-3)
    exact = run(plain, REQUESTS, forward="eager", **options)
    assert logprobs(got) == pytest.approx(logprobs(exact), abs=tolerance)
    assert got.token_ids() == exact.token_ids()


EXPERT_CASES: dict[str, tuple[Sample, int, float]] = {  # with the experts' inner size
    "fp8-blocks": (BLOCKS, 128, ROUNDED),
    "awq": (SAMPLES["awq"], 96, EXACT),
    "ct-packed-8-bits": (SAMPLES["ct-packed-8-bits"], 96, EXACT),
    "ct-mxfp4": (SAMPLES["ct-mxfp4"], 96, EXACT),
    "ct-nvfp4": (SAMPLES["ct-nvfp4"], 96, EXACT),
}
ALIKE = ("ct-mxfp4", "ct-nvfp4", "awq")  # as the experts of gpt-oss, and as 8 bits


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else [])
        for name in EXPERT_CASES
    ],
)
def test_experts(
    name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path, interpreted: pytest.MonkeyPatch
) -> None:
    sample, inner, tolerance = EXPERT_CASES[name]
    sizes = {"hidden_size": 96, "intermediate_size": inner, "num_hidden_layers": 1}
    path = tiny_checkpoints("mixtral", **sizes)
    torch.manual_seed(0)
    quantised, plain = quantise(path, tmp_path, small(sample), (".w1", ".w2", ".w3"))
    options: dict[str, Any] = {"max_running_requests": 2, "max_step_tokens": 6}

    got = run(quantised, REQUESTS, graph_runner=Rerun(), held="stored", **options)
    interpreted.undo()

    same = run(quantised, REQUESTS, forward="eager", held="stored", **options)
    assert got.token_ids() == same.token_ids()
    assert logprobs(got) == pytest.approx(logprobs(same), abs=1e-3)
    exact = run(plain, REQUESTS, forward="eager", **options)
    assert logprobs(got) == pytest.approx(logprobs(exact), abs=tolerance)


def test_experts_of_gpt_oss(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, interpreted: pytest.MonkeyPatch
) -> None:
    """Which are stored in one tensor of MXFP4, gates and ups in turn, with biases."""
    path = tiny_checkpoints("gpt-oss", num_hidden_layers=1)
    torch.manual_seed(0)
    quantised, plain = pack_gpt_oss(path, tmp_path)
    options: dict[str, Any] = {"max_running_requests": 2, "max_step_tokens": 6}

    got = run(quantised, REQUESTS, graph_runner=Rerun(), held="stored", **options)
    interpreted.undo()

    same = run(quantised, REQUESTS, forward="eager", held="stored", **options)
    exact = run(plain, REQUESTS, forward="eager", **options)
    assert got.token_ids() == same.token_ids() == exact.token_ids()
    assert logprobs(got) == pytest.approx(logprobs(same), abs=1e-3)
    assert logprobs(got) == pytest.approx(logprobs(exact), abs=EXACT)
