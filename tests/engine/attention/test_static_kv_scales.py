"""Whole engines whose K and V have static scales, of a checkpoint or of a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.configs.planning.kv_format import KVScales
from remora.engine.models.checkpoint import read_config
from remora.engine.types import SamplingParams
from remora.kernels.kv_store import GREATEST, KV_DTYPES
from tests.conftest import TinyCheckpoints
from tests.engine.attention.test_kv_dtype import LENGTHS, scores
from tests.engine.models.test_parity import make_llm, make_prompts
from tests.engine.parallel.runs import run as run_ranks

SCHEMES = {"fp8_e4m3": "float", "int8": "int"}
DTYPES = {"fp8_e4m3": "float8_e4m3fn", "int8": "int8", "fp8_e5m2": "float8_e5m2"}
EVERY_FORMAT = pytest.mark.parametrize("kv_dtype", SCHEMES)
# Magnitudes of K and V that are not clipped: more than any in these models, and less.
ALL, FEW = 8.0, 0.05


def with_scales(path: Path, to: Path, kv_dtype: str, greatest: float) -> Path:
    """Copy a checkpoint and give it one scale for K and one for V of each layer."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": SCHEMES[kv_dtype], "symmetric": True},
    }
    (to / "config.json").write_text(json.dumps(config))
    (file,) = to.glob("*.safetensors")
    tensors = load_file(file)
    for layer in range(config["num_hidden_layers"]):
        for part in "kv":
            name = f"model.layers.{layer}.self_attn.{part}_scale"
            tensors[name] = torch.tensor([greatest / GREATEST[KV_DTYPES[kv_dtype]]])
    save_file(tensors, file)
    return to


def scale_file(path: Path, to: Path, kv_dtype: str, greatest: float) -> str:
    """Write a file with the same scale for all layers of a checkpoint."""
    scale = greatest / GREATEST[KV_DTYPES[kv_dtype]]
    layers = {str(layer): scale for layer in range(read_config(path).num_layers)}
    content = {"dtype": DTYPES[kv_dtype], "scaling_factor": {"0": layers}}
    to.write_text(json.dumps({"model_type": "llama", "kv_cache": content}))
    return str(to)


def found_scores(path: Path, prompts: list[list[int]], **options: Any) -> list[list[float]]:
    llm = make_llm(path, **options)
    try:
        return scores(llm, prompts)
    finally:
        llm.close()


@pytest.mark.observes("engine.kv_scales_file")
@EVERY_FORMAT
@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_a_file_and_a_checkpoint_with_the_same_scales_are_the_same(
    kv_dtype: str, cpu_kernels: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoints("llama"), make_prompts([33])
    common = {"kv_dtype": kv_dtype, "cpu_kernels": cpu_kernels}
    checkpoint = with_scales(path, tmp_path / "scaled", kv_dtype, FEW)
    file = scale_file(path, tmp_path / "few.json", kv_dtype, FEW)
    other = scale_file(path, tmp_path / "all.json", kv_dtype, ALL)

    clipped = found_scores(checkpoint, prompts, **common)

    assert found_scores(path, prompts, kv_scales_file=file, **common) == clipped
    assert found_scores(checkpoint, prompts, cpu_kernels=cpu_kernels) == clipped  # declared
    assert found_scores(checkpoint, prompts, kv_scales_file=other, **common) != clipped
    assert found_scores(path, prompts, **common) != clipped


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_native_and_torch_differ_by_far_less_than_rounding(
    family: str, kv_dtype: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoints(family), make_prompts([70, 33])
    file = scale_file(path, tmp_path / "scales.json", kv_dtype, ALL)
    static = {"kv_dtype": kv_dtype, "kv_scales_file": file}

    native, torch_, wide = (
        np.concatenate([each[:69] for each in found_scores(path, prompts, **options)])
        for options in (static, static | {"cpu_kernels": "torch"}, {})
    )

    assert np.abs(native - torch_).mean() < np.abs(native - wide).mean() / 4


@EVERY_FORMAT
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_tokens": 7, "max_step_tokens": 40},
        {"kv_tokens": 512, "schedule_conservativeness": 0.05, "num_threads": 2},
        {"max_running_requests": 1},
    ],
    ids=str,
)
def test_chunks_company_and_threads_change_no_bit(
    kv_dtype: str, options: dict[str, Any], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoints("mistral"), make_prompts(LENGTHS)
    file = scale_file(path, tmp_path / "scales.json", kv_dtype, 1.0)
    common = {"kv_dtype": kv_dtype, "dtype": "bfloat16", "kv_scales_file": file}

    assert found_scores(path, prompts, **(common | options)) == found_scores(
        path, prompts, **common
    )


def uneven_scales(path: Path, kv_dtype: str) -> KVScales:
    """Return scales of which those of some heads clip almost everything."""
    config = read_config(path)
    each = range(config.num_kv_heads)
    sizes = [
        [[FEW if (layer + part + head) % 3 == 0 else ALL for head in each] for part in (0, 1)]
        for layer in range(config.num_layers)
    ]
    greatest = GREATEST[KV_DTYPES[kv_dtype]]
    scales = torch.tensor(sizes, dtype=torch.float64) / greatest
    return tuple((tuple(k), tuple(v)) for k, v in scales.tolist())


@EVERY_FORMAT
@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_ranks_have_the_scales_of_their_heads_and_layers(
    kv_dtype: str, ranks: dict[str, int], tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama")
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    requests = {"long": (make_prompts([30])[0], greedy)}
    scales = uneven_scales(path, kv_dtype)

    expected = run_ranks(path, requests, kv_dtype=kv_dtype, kv_scales=scales)
    found = run_ranks(path, requests, kv_dtype=kv_dtype, kv_scales=scales, **ranks)
    own = run_ranks(path, requests, kv_dtype=kv_dtype)

    for logits, exact in zip(found.steps, expected.steps, strict=True):
        torch.testing.assert_close(logits, exact, atol=0.05, rtol=0)
    assert (own.steps[-1] - expected.steps[-1]).abs().max() > 0.2


@pytest.mark.parametrize(
    "names",
    [
        {"k_scale": "kv_scale", "v_scale": None},
        {"k_scale": "k_proj.k_scale", "v_scale": "v_proj.v_scale"},
    ],
    ids=str,
)
def test_a_modelopt_checkpoint_with_8_bits_for_k_and_v_alone_is_read(
    names: dict[str, str | None], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, prompts = tiny_checkpoints("llama"), make_prompts([33])
    to = with_scales(path, tmp_path / "scaled", "fp8_e4m3", FEW)
    expected = found_scores(to, prompts)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (to / "config.json").write_text(json.dumps(config))
    (file,) = to.glob("*.safetensors")
    renamed = {}
    for name, tensor in load_file(file).items():
        module, _, last = name.rpartition(".")
        if (new := names.get(last, last)) is not None:
            renamed[f"{module}.{new}"] = tensor
    save_file(renamed, file)

    assert found_scores(to, prompts) == expected


def test_a_file_that_does_not_fit_is_refused_before_weights_are_read(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    file = scale_file(path, tmp_path / "scales.json", "int8", 1.0)

    with pytest.raises(ConfigError, match=r"is for int8, and engine\.kv_dtype is fp8_e4m3"):
        make_llm(path, kv_dtype="fp8_e4m3", kv_scales_file=file)
    with pytest.raises(ConfigError, match=r"kv_scales_file = .*cached in the model's format"):
        make_llm(path, kv_scales_file=file)
