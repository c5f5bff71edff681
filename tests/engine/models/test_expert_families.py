"""Families with experts or latents against transformers, on checkpoints that it wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.configs.planning.device_plan import DevicePlan
from remora.engine.graphs.coverage import not_covered
from remora.engine.models.architectures import parse_config
from remora.engine.models.checkpoint import read_config
from remora.engine.models.config import ExpertsConfig
from remora.engine.runner.device import make_attention
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.loaded import load
from tests.engine.models.logits import NUM_TOKENS, assert_same, make_ids
from tests.engine.models.oracle import Oracle
from tests.engine.models.paged_model import PagedModel


def test_llama4_of_a_checkpoint_with_images_is_its_text(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, ids = tiny_checkpoints("llama4"), make_ids(NUM_TOKENS)
    tensors = load_file(path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    seeing = ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")
    save_file(
        {**tensors, **{name: torch.ones(2) for name in seeing}}, tmp_path / "model.safetensors"
    )
    raw = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": read_raw(path)}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vision_config": {"hidden_size": 4}}))

    assert_same(
        PagedModel(load(tmp_path)).step(a=ids)["a"], PagedModel(load(path)).step(a=ids)["a"]
    )


def test_llama4_without_norms_of_heads_still_grows_in_some_layers_alone(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path, ids = tiny_checkpoints("llama4", use_qk_norm=False), make_ids(NUM_TOKENS)

    assert_same(PagedModel(load(path)).step(a=ids)["a"], Oracle(path).logits(ids))


def test_what_is_in_no_kernel_of_chunked_attention_is_said(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    model = load(tiny_checkpoints("llama4"))
    plan = make_plan(device="cuda", on_device=DevicePlan(attention_backend="triton"))

    assert not_covered(model.config) == []
    with pytest.raises(ConfigError, match=r"support attention chunks; set it to .*torch"):
        make_attention(model, plan, 4)


def read_raw(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw


def test_dense_layers_stand_where_the_config_says(tiny_checkpoints: TinyCheckpoints) -> None:
    def sparse(family: str) -> list[bool]:
        layers = read_config(tiny_checkpoints(family)).layers
        return [isinstance(layer.mlp, ExpertsConfig) for layer in layers]

    assert sparse("mixtral") == [True, True, True]
    assert sparse("qwen2-moe") == [True, False, True]
    assert sparse("qwen3-moe") == [False, True, False]
    assert sparse("llama4") == [False, True, False]
    assert sparse("deepseek-v3") == [False, True, True]


def test_yarn_scales_scores_of_latent_attention(tiny_checkpoints: TinyCheckpoints) -> None:
    raw = read_raw(tiny_checkpoints("deepseek-v3"))
    plain = {**raw, "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}}

    scaled, unscaled = (parse_config(each).attention for each in (raw, plain))

    assert unscaled.scale == 24**-0.5
    assert scaled.scale == pytest.approx(24**-0.5 * (0.1 * 1.3862944 + 1) ** 2)
    assert replace(scaled, scale=unscaled.scale) == unscaled


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok in config.json is 5, of 4"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts in config.json is missing"),
        ("mixtral", {"hidden_act": "gelu"}, "'gelu'; experts know silu"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv in config.json is 8.0"),
        ("deepseek-v3", {"n_group": 3}, "3 groups .n_group. of 8 experts"),
        ("deepseek-v3", {"topk_group": 1, "num_experts_per_tok": 3}, "inconsistent"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func .* only 'sigmoid'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method in config.json is 'noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob in config.json is true"),
        ("deepseek-v2-lite", {"attention_bias": True}, "attention_bias .* q_lora_rank"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types .* must hold 3"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok .* is 2; .* known for one"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers .* has 2 entries for 3 layers"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size .* is missing"),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, "out of chunked_attention, full_"),
    ],
)
def test_what_is_not_known_is_refused(
    family: str, settings: dict[str, Any], message: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    raw = read_raw(tiny_checkpoints(family))

    with pytest.raises(ConfigError, match=message):
        parse_config({**raw, **settings})
