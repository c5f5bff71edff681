"""Whole engines of which some layers cache K and V in the model's format, and others in 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from remora.engine.models.checkpoint import read_config
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.attention.test_kv_dtype import LENGTHS
from tests.engine.attention.test_static_kv_scales import ALL, found_scores, scale_file
from tests.engine.models.test_parity import make_prompts
from tests.engine.parallel.runs import run as run_ranks

FAMILIES = pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss"])


@pytest.mark.observes("engine.kv_dtype_skip_layers")
@FAMILIES
@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_layers_that_are_skipped_are_as_without_8_bits(
    family: str, cpu_kernels: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts([33])
    common = {"cpu_kernels": cpu_kernels}
    every = list(range(read_config(path).num_layers))

    wide = found_scores(path, prompts, **common)
    all_skipped = found_scores(path, prompts, kv_dtype="int8", kv_dtype_skip_layers=every, **common)
    some = found_scores(path, prompts, kv_dtype="int8", kv_dtype_skip_layers=[0], **common)
    narrow = found_scores(path, prompts, kv_dtype="int8", **common)

    assert all_skipped == wide
    assert some not in (wide, narrow)
    error, most = (np.abs(np.array(each) - np.array(wide)).mean() for each in (some, narrow))
    assert error < 2 * most


@FAMILIES
def test_native_and_torch_differ_by_far_less_than_rounding(
    family: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts([70, 33])
    mixed = {
        "kv_dtype": "fp8_e4m3",
        "kv_dtype_skip_layers": [1],
        "kv_scales_file": scale_file(path, tmp_path / "scales.json", "fp8_e4m3", ALL),
    }

    native, torch_, wide = (
        np.concatenate([each[:69] for each in found_scores(path, prompts, **options)])
        for options in (mixed, mixed | {"cpu_kernels": "torch"}, {})
    )

    assert np.abs(native - torch_).mean() < np.abs(native - wide).mean() / 4


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_chunks_and_company_change_no_bit(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts(LENGTHS)
    mixed = {"kv_dtype": "int8", "kv_dtype_skip_layers": [1], "dtype": "bfloat16"}
    cut = {"prefill_chunk_tokens": 7, "max_step_tokens": 40, "num_threads": 2}

    assert found_scores(path, prompts, **mixed, **cut) == found_scores(path, prompts, **mixed)


def test_stages_skip_their_own_layers(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    requests = {"long": (make_prompts([30])[0], greedy)}
    mixed = {"kv_dtype": "fp8_e5m2", "kv_skip_layers": (1,)}

    expected = run_ranks(path, requests, **mixed)
    found = run_ranks(path, requests, **mixed, pp_size=2)

    for logits, exact in zip(found.steps, expected.steps, strict=True):
        torch.testing.assert_close(logits, exact, atol=1e-4, rtol=0)
