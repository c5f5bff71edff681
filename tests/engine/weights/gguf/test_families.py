"""Models of each kind that GGUF knows by other names: what is read computes what was converted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.engine.models.checkpoint import read_config, read_raw_config
from remora.engine.models.config import ExpertsConfig
from remora.engine.models.implementation import Theirs, implementation_of
from remora.engine.weights.gguf.weights import GGUFWeights
from tests.engine.loaded import load
from tests.engine.models.paged_model import PagedModel
from tests.engine.weights.gguf.converter import Kind, convert, writing
from tests.engine.weights.gguf.kinds import COMMON, KINDS

IDS = torch.arange(3, 27)


def make_checkpoint(kind: Kind, folder: Path) -> torch.Tensor:
    """Save a random model whose every part counts; return its logits of IDS."""
    config = AutoConfig.for_model(kind.model, **{**COMMON, **kind.settings})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    with torch.inference_mode():
        found: torch.Tensor = model(IDS.unsqueeze(0)).logits[0]
    return found


def our_logits(path: Path) -> torch.Tensor:
    return PagedModel(load(path)).step(a=IDS.tolist())["a"]


@pytest.mark.parametrize("name", KINDS)
def test_a_converted_model_is_the_model(name: str, tmp_path: Path) -> None:
    expected = make_checkpoint(KINDS[name], tmp_path / "original")

    file = convert(KINDS[name], tmp_path / "original", tmp_path / "model.gguf")

    assert expected.std() > 0.01
    found = our_logits(file)
    torch.testing.assert_close(found, expected[-len(found) :], rtol=0, atol=2e-4)


def test_files_say_in_halves_what_older_ones_have_whole(tmp_path: Path) -> None:
    """Some have both, and then the whole counts."""
    kind = KINDS["deepseek2"]

    def both(name: str, values: torch.Tensor, raw: dict[str, Any]) -> dict[str, torch.Tensor]:
        halves = kind.change(name, values, raw)
        return {**halves, name: values} if "kv_b_proj" in name else halves

    make_checkpoint(kind, tmp_path / "original")
    halves = GGUFWeights(convert(kind, tmp_path / "original", tmp_path / "halves.gguf"))
    file = convert(replace(kind, change=both), tmp_path / "original", tmp_path / "both.gguf")

    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert halves.shapes() == GGUFWeights(file).shapes()
    assert torch.equal(dict(halves.read([name]))[name], dict(GGUFWeights(file).read([name]))[name])


def test_longrope_beyond_the_original_length_and_yarn_are_read(tmp_path: Path) -> None:
    for name in ("phi3, longrope", "gpt-oss", "deepseek2"):
        make_checkpoint(KINDS[name], tmp_path / name)
        convert(KINDS[name], tmp_path / name, tmp_path / f"{name}.gguf")

        found = read_config(tmp_path / f"{name}.gguf")

        expected = read_config(tmp_path / name)
        ours, theirs = found.layers[0].rope, expected.layers[0].rope
        assert replace(ours, attention_factor=1.0) == replace(theirs, attention_factor=1.0)
        assert ours.attention_factor == pytest.approx(theirs.attention_factor)
        assert found.max_position == expected.max_position


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("llama", "attention.temperature_scale", 0.1, r"temperature_scale = 0\.1.*not known"),
        ("olmoe", "attention.clamp_kqv", 8.0, r"clamp_kqv = 8\.0"),
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0], "dimension_sections"),
        ("olmo2", "attention.sliding_window", 8, "an OLMo 3"),
        ("granite", "rope.scaling.finetuned", False, "a Granite without rotation"),
        ("minicpm", "expert_count", 8, "a MiniCPM with experts"),
        ("llama4", "attention.sliding_window", 0, "a Llama 4 without chunks"),
        ("deepseek2", "expert_gating_func", 4, "chooses experts by expert_gating_func 4"),
        ("qwen2", "attention.head_count", [4, 2], r"head_count is \[4, 2\]; it must be a whole"),
        ("gpt2", "block_count", None, "gpt2.block_count is missing"),
    ],
)
def test_what_would_change_the_numbers_is_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = write_metadata(tmp_path / "model.gguf", name, {key: value})

    with pytest.raises(ConfigError, match=message):
        read_raw_config(file, {})


def write_metadata(file: Path, name: str, metadata: dict[str, Any]) -> Path:
    """Write a file of settings and one tensor."""
    said = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 48,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        **metadata,
    }
    with writing(file, name, said) as writer:
        writer.add_tensor("token_embd.weight", torch.zeros(64, 48).numpy())
    return file


def test_baichuan_of_40_layers_has_alibi(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "model.gguf", "baichuan", {"block_count": 40})

    found = read_config(file)

    assert (found.attention.alibi, found.layers[0].rope.kind) == (1.0, "none")
    assert found.max_position == 128


@pytest.mark.parametrize(
    ("num_kv_heads", "theta"), [(1, 10_000.0), (2, 500_042.0)], ids=["7B", "11B"]
)
def test_falcon_files_do_not_say_theta(num_kv_heads: int, theta: float, tmp_path: Path) -> None:
    said = {"attention.head_count_kv": num_kv_heads}

    found = read_config(write_metadata(tmp_path / "model.gguf", "falcon", said))

    assert found.layers[0].rope.theta == theta
    assert (found.num_kv_heads, found.block.mlp_norm) == (num_kv_heads, None)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    kind = KINDS["glm4moe"]
    make_checkpoint(kind, tmp_path / "original")
    said = {**kind.metadata, "nextn_predict_layers": 1}

    file = convert(replace(kind, metadata=said), tmp_path / "original", tmp_path / "model.gguf")

    assert read_config(file).num_layers == 1
    assert not [name for name in GGUFWeights(file).shapes() if "blk." in name or ".1.mlp" in name]


def test_products_side_by_side_are_cut_apart_in_quantised_blocks_too(tmp_path: Path) -> None:
    whole = torch.randn(64 + 32 + 32, 64)
    stored = gguf.GGMLQuantizationType.Q8_0
    file = tmp_path / "model.gguf"
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2}
    data = gguf.quantize(whole.numpy(), stored)
    with writing(file, "phi3", {"embedding_length": 64, "block_count": 1, **heads}) as writer:
        writer.add_tensor("blk.0.attn_qkv.weight", data, raw_dtype=stored)

    source = GGUFWeights(file)

    parts = [values for _, values in source.read(source.shapes())]
    assert [tuple(values.shape) for values in parts] == [(64, 64), (32, 64), (32, 64)]
    expected = torch.from_numpy(gguf.dequantize(data, stored))
    assert torch.equal(torch.cat(parts), expected)


def test_rows_that_are_not_those_of_the_heads_are_refused(tmp_path: Path) -> None:
    kind = KINDS["phi3"]
    make_checkpoint(kind, tmp_path / "original")
    said = {**kind.metadata, "attention.head_count_kv": 1}
    file = convert(replace(kind, metadata=said), tmp_path / "original", tmp_path / "model.gguf")

    with pytest.raises(ConfigError, match=r"attn_qkv\.weight has 96 rows, which are not"):
        GGUFWeights(file)


def test_transformers_runs_those_whose_names_it_shares(tmp_path: Path) -> None:
    theirs = Loading(impl="transformers")
    llama, phi3 = (
        write_metadata(tmp_path / f"{name}.gguf", name, {}) for name in ("llama", "phi3")
    )

    assert isinstance(implementation_of(llama, theirs), Theirs)
    with pytest.raises(ConfigError, match=r"GGUF file of Phi3ForCausalLM.*Set model\.impl: auto"):
        implementation_of(phi3, theirs)


def test_older_files_mean_what_was_published_then(tmp_path: Path) -> None:
    latents = {
        "attention.kv_lora_rank": 16,
        "attention.key_length": 12,
        "attention.value_length": 6,
        "rope.dimension_count": 4,
        "expert_used_count": 8,
        "expert_feed_forward_length": 16,
    }
    groups = []
    for number, gating in ((64, 1), (160, 1), (256, 2)):
        said = {**latents, "expert_count": number, "expert_gating_func": gating}
        found = read_config(write_metadata(tmp_path / f"{number}.gguf", "deepseek2", said))
        mlp = found.layers[0].mlp
        assert isinstance(mlp, ExpertsConfig)
        routing = mlp.routing
        groups.append((routing.num_groups, routing.top_groups, routing.is_sigmoid))
    minicpm = read_config(write_metadata(tmp_path / "minicpm.gguf", "minicpm", {}))

    assert groups == [(1, 1, False), (8, 3, False), (8, 4, True)]
    assert (minicpm.embedding.scale, minicpm.head.scale) == (12.0, 256 / 48)
    assert minicpm.block.residual_scale == pytest.approx(1.4 / 2**0.5)
