"""Models that transformers' code runs on our KV cache, against transformers alone.

Loaded from disk as a user would, in float32: families that we do not know, and some that we do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.engine.fallback.load import load_fallback, structure_of
from remora.engine.fallback.model import FallbackModel
from remora.engine.llm import SamplingParams
from remora.engine.models.checkpoint import read_raw_config
from remora.engine.models.implementation import Ours, Theirs, implementation_of
from remora.engine.parallel.layout import WHOLE
from remora.engine.weights.safetensors import SafetensorsWeights
from tests.conftest import TinyCheckpoints
from tests.engine.fallback.checkpoints import FAMILIES
from tests.engine.fallback.conftest import Checkpoints
from tests.engine.models.logits import assert_logits
from tests.engine.models.oracle import Oracle
from tests.engine.models.test_parity import GREEDY, bfloat16_error, ids, make_llm, make_prompts

OURS_TOO = ("llama", "qwen2", "qwen3", "mistral")


def load(path: Path) -> FallbackModel:
    structure = structure_of(path, read_raw_config(path), trust_code=False)
    return load_fallback(
        structure,
        SafetensorsWeights(path),
        dtype=torch.float32,
        device="cpu",
        layout=WHOLE,
        show_progress=False,
        num_threads=1,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_however_they_come_about(
    family: str, checkpoints: Checkpoints
) -> None:
    path = checkpoints(family)

    assert_logits(load(path), Oracle(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers(family: str, checkpoints: Checkpoints) -> None:
    path = checkpoints(family)
    llm = make_llm(path, impl="transformers", prefill_chunk_tokens=32)
    prompts = make_prompts([1, 16, 70])

    outputs = ids(llm, prompts)
    again = llm.generate(prompts, GREEDY)

    oracle = Oracle(path)
    for prompt, output, cached in zip(prompts, outputs, again, strict=True):
        oracle.assert_greedy(prompt, output)
        oracle.assert_same(prompt, output, cached.token_ids)
    assert again[2].num_cached_tokens > 0


@pytest.mark.parametrize("family", ["opt", "helium", "apertus", "persimmon", "exaone4"])
def test_families_that_we_do_not_know_are_left_to_transformers(
    family: str, checkpoints: Checkpoints
) -> None:
    assert isinstance(implementation_of(checkpoints(family), Loading()), Theirs)
    with pytest.raises(ConfigError):
        implementation_of(checkpoints(family), Loading(impl="remora"))


@pytest.mark.observes("model.impl")
@pytest.mark.parametrize("family", OURS_TOO)
def test_families_of_ours_give_the_same_both_ways(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)
    prompts = make_prompts([5, 33, 60])
    assert isinstance(implementation_of(path, Loading()), Ours)

    ours = ids(make_llm(path, impl="remora"), prompts)
    theirs = ids(make_llm(path, impl="transformers"), prompts)

    oracle = Oracle(path)
    for prompt, one, other in zip(prompts, ours, theirs, strict=True):
        oracle.assert_same(prompt, one, other)
    assert_logits(load(path), oracle)


def test_sampling_and_logprobs_work_as_with_models_of_ours(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints("llama")
    prompts = make_prompts([20, 55])
    params = SamplingParams(
        max_tokens=10, temperature=0.7, seed=5, logprobs=4, prompt_logprobs=3, ignore_eos=True
    )

    theirs = make_llm(path, impl="transformers", prefill_chunk_tokens=16).generate(prompts, params)
    ours = make_llm(path).generate(prompts, params)

    for one, other in zip(theirs, ours, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for line, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert line.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_preempted_sequences_go_on(checkpoints: Checkpoints) -> None:
    path = checkpoints("exaone4")
    prompts = make_prompts([30, 60, 90, 40, 50, 70])
    # Admission cannot know that outputs will be of full length.
    params = SamplingParams(max_tokens=24, temperature=0.0, logit_bias={2: -1000.0})
    llm = make_llm(path, kv_tokens=240, schedule_conservativeness=0.05)

    outputs = ids(llm, prompts, params)

    assert llm.stats().preemptions_total > 0
    oracle = Oracle(path)
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.assert_greedy(prompt, output)


def test_bfloat16_runs_and_stays_close(checkpoints: Checkpoints) -> None:
    assert bfloat16_error(checkpoints("helium")) < 0.3
