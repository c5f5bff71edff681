"""Whole engines whose K and V are 8 bits: the same bits however work is cut, and torch's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remora.engine.llm import LLM
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.models.test_parity import EOS, make_llm, make_prompts
from tests.engine.parallel.runs import run as run_ranks

SCORED = SamplingParams(
    max_tokens=24, temperature=0.0, logit_bias={EOS: -1000.0}, logprobs=0, prompt_logprobs=0
)
LENGTHS = [1, 5, 33, 70, 150, 120]
FORMATS = ["int8", "fp8_e4m3"]
EVERY_FORMAT = pytest.mark.parametrize("kv_dtype", [*FORMATS, "fp8_e5m2"])


def scores(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    """Return log-probabilities of the tokens of prompts and outputs."""
    return [
        [
            each.logprob
            for each in (*(found.prompt_logprobs or ())[1:], *(found.logprobs or ()))
            if each is not None
        ]
        for found in llm.generate(prompts, SCORED)
    ]


@pytest.mark.observes("engine.kv_dtype")
@EVERY_FORMAT
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss"])
def test_native_and_torch_differ_by_far_less_than_rounding(
    family: str, kv_dtype: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts([70, 33])
    found = {}
    for name, options in {
        "native": {"kv_dtype": kv_dtype},
        "torch": {"kv_dtype": kv_dtype, "cpu_kernels": "torch"},
        "wide": {},
    }.items():
        llm = make_llm(path, **options)
        found[name] = np.concatenate([each[:69] for each in scores(llm, prompts)])
        llm.close()

    # A number between two codes may be rounded either way, so kernels differ by few codes.
    apart = np.abs(found["native"] - found["torch"]).mean()
    rounding = np.abs(found["native"] - found["wide"]).mean()
    assert apart < rounding / 4


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_tokens": 7, "max_step_tokens": 40},
        {"prefix_cache": False, "num_threads": 2},
        {"kv_tokens": 256, "schedule_conservativeness": 0.05},
        {"max_running_requests": 1},
    ],
    ids=str,
)
def test_chunks_company_preemption_and_threads_change_no_bit(
    family: str, kv_dtype: str, options: dict[str, Any], tiny_checkpoints: TinyCheckpoints
) -> None:
    is_scarce = "kv_tokens" in options
    path, prompts = tiny_checkpoints(family), make_prompts([40] * 6 if is_scarce else LENGTHS)
    common = {"kv_dtype": kv_dtype, "dtype": "bfloat16"}
    whole, cut = make_llm(path, **common), make_llm(path, **(common | options))
    expected = scores(whole, prompts)

    assert scores(cut, prompts) == expected
    assert (cut.stats().preemptions_total > 0) == is_scarce
    whole.close()
    cut.close()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_cached_prefix_changes_no_bit(kv_dtype: str, tiny_checkpoints: TinyCheckpoints) -> None:
    llm = make_llm(tiny_checkpoints("llama"), kv_dtype=kv_dtype, dtype="bfloat16")
    (prompt,) = make_prompts([200])
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)

    (first,), (again,) = llm.generate([prompt], params), llm.generate([prompt], params)

    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 192)
    assert again.logprobs == first.logprobs
    llm.close()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_ranks_have_scales_for_their_own_heads(
    kv_dtype: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path: Path = tiny_checkpoints("llama")
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    requests = {"long": (make_prompts([30])[0], greedy)}

    expected = run_ranks(path, requests, kv_dtype=kv_dtype)
    found = run_ranks(path, requests, kv_dtype=kv_dtype, tp_size=2)

    assert found.token_ids == expected.token_ids
    for logits, exact in zip(found.steps, expected.steps, strict=True):
        torch.testing.assert_close(logits, exact, atol=0.05, rtol=0)
