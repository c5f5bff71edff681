"""Final hidden states of a request are those of transformers, however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from remora.configs.errors import InvalidSampling
from remora.engine.llm import LLM, SamplingParams
from tests.conftest import TinyCheckpoints

ASKING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, hidden_states=True)
PLAIN = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(3, 40)), [7, 8, 9], list(range(3, 40))]


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


def make_llm(path: Path, **options: Any) -> LLM:
    common: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "show_progress": False}
    return LLM(str(path), **(common | {"kv_tokens": 1024} | options))


def expected(path: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    found: npt.NDArray[np.float32] = out.hidden_states[-1][0].numpy()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_kernels": "torch"},
        {"cpu_kernels": "native"},
        {"cpu_kernels": "torch", "prefill_chunk_tokens": 8},
        {"cpu_kernels": "native", "prefill_chunk_tokens": 8, "max_step_tokens": 16},
        {"cpu_kernels": "torch", "kv_tokens": 80, "schedule_conservativeness": 0.05},
    ],
    ids=["torch", "native", "torch-chunked", "native-chunked", "preempted"],
)
def test_they_are_those_of_transformers(llama: Path, options: dict[str, Any]) -> None:
    llm = make_llm(llama, **options)
    for _ in range(2):  # the second time the prefix cache holds the prompts
        for prompt, found in zip(PROMPTS, llm.generate(PROMPTS, ASKING), strict=True):
            states = expected(llama, prompt + found.token_ids[:-1])
            assert found.hidden_states is not None
            assert found.hidden_states.shape == states.shape
            np.testing.assert_allclose(found.hidden_states, states, atol=2e-4, rtol=2e-4)


def test_who_did_not_ask_gets_none_and_the_same_tokens(llama: Path) -> None:
    llm = make_llm(llama)
    asked, plain = llm.generate([PROMPTS[0], PROMPTS[0]], [ASKING, PLAIN])
    assert plain.hidden_states is None
    assert asked.token_ids == plain.token_ids


@pytest.mark.parametrize("field", [{"n": 2}, {"stop": ("a",)}, {"stop_regex": ("ab",)}])
def test_what_they_are_not_told_with_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidSampling, match="with hidden states"):
        SamplingParams(hidden_states=True, **field)
