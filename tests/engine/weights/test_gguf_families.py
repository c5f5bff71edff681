"""Models of each kind that GGUF knows by other names: what is read is what was converted.

The converter here takes its names from the gguf package's own tables, and the model that is made of
what we read is transformers', so that neither names nor settings are compared with themselves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from remora.engine.models.registry import load_model
from remora.engine.weights.gguf import GGUFWeights, read_gguf_config
from tests.engine.models.paged_model import PagedModel

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Their name -> GGUF's, transformers' settings, and what the converter writes of them.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 12}, {}),
    "mixtral": (
        "llama",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 12},
        {"expert_count": 3, "expert_used_count": 2},
    ),
    "qwen2_moe": (
        "qwen2moe",
        {**EXPERTS, "shared_expert_intermediate_size": 24},
        {
            "expert_count": 3,
            "expert_used_count": 2,
            "expert_feed_forward_length": 16,
            "expert_shared_feed_forward_length": 24,
        },
    ),
    "qwen3_moe": (
        "qwen3moe",
        {**EXPERTS, "norm_topk_prob": True, "head_dim": 16},
        {
            "expert_count": 3,
            "expert_used_count": 2,
            "expert_feed_forward_length": 16,
            "attention.key_length": 16,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        {
            "attention.key_length": 16,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": (
        "gemma3",
        {**WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
        {
            "attention.key_length": 16,
            "attention.sliding_window": 8,
            "rope.freq_base": 1_000_000.0,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "olmo2": ("olmo2", {}, {}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 5.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
        {
            "attention.scale": 0.3,
            "embedding_scale": 5.0,
            "residual_scale": 0.4,
            "logit_scale": 3.0,
        },
    ),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": None},
        {"attention.layer_norm_epsilon": 1e-5},
    ),
}
PERMUTED = ("llama", "granite")
ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")


def make_checkpoint(kind: str, folder: Path) -> Path:
    """Save a random model whose every part counts."""
    _, settings, _ = FAMILIES[kind]
    config = AutoConfig.for_model(kind, **{**COMMON, **settings})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def convert(kind: str, folder: Path, file: Path) -> Path:
    """Write a checkpoint as the converters of llama.cpp do."""
    name, _, metadata = FAMILIES[kind]
    raw = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    if "rms_norm_eps" in raw:
        writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if "rope_theta" in raw["rope_parameters"]:
        writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    for key, value in metadata.items():
        value_type = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{name}.{key}", value, value_type)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], raw["num_hidden_layers"])
    for stored, values in stacked(load_file(folder / "model.safetensors")).items():
        short = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert short is not None, stored
        writer.add_tensor(short, converted(name, raw, stored, values).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the experts of a layer into one tensor each."""
    found: dict[str, Any] = {}
    for name, values in sorted(tensors.items()):
        expert = EXPERT.fullmatch(name)
        if expert is None:
            found[name] = values
        else:
            found.setdefault(f"{expert[1]}.experts.{expert[3]}", []).append(values)
    return {
        name: torch.stack(value) if isinstance(value, list) else value
        for name, value in found.items()
    }


def converted(name: str, raw: dict[str, Any], stored: str, values: torch.Tensor) -> torch.Tensor:
    """Change the values that converters change."""
    if name in PERMUTED and re.search(r"\.[qk]_proj\.", stored):
        num_heads = raw["num_attention_heads" if ".q_" in stored else "num_key_value_heads"]
        pairs = values.view(num_heads, 2, -1, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    if name.startswith("gemma") and stored.endswith("norm.weight"):
        values = values + 1
    if stored.endswith("shared_expert_gate.weight"):
        values = values.squeeze()
    return values.contiguous()


@torch.inference_mode()
def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 27).unsqueeze(0)
    found: torch.Tensor = model(ids).logits
    return found


def our_logits(path: Path) -> torch.Tensor:
    model = load_model(
        path, dtype=torch.float32, load_format="auto", device="cpu", show_progress=False
    )
    return PagedModel(model).step(a=list(range(3, 27)))["a"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_converted_model_is_the_model(kind: str, tmp_path: Path) -> None:
    original = make_checkpoint(kind, tmp_path / "original")
    file = convert(kind, original, tmp_path / "model.gguf")
    back = tmp_path / "back"
    back.mkdir()

    source = GGUFWeights(file)
    tensors = {name: values.contiguous() for name, values in source.read(source.shapes().keys())}
    save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
    (back / "config.json").write_text(json.dumps(read_gguf_config(file)))

    expected = load_file(original / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, values in tensors.items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-6)
    expected_logits = logits_of(original)
    torch.testing.assert_close(logits_of(back), expected_logits, rtol=0, atol=1e-4)
    found = our_logits(file)
    torch.testing.assert_close(found, expected_logits[0, -len(found) :], rtol=0, atol=1e-3)
