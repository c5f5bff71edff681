"""config.json files as they are published, and what is meant by what they leave out.

`published.jsonl` has one a line, in what says how a model computes, with how many numbers the
published weights of the text have; null where that is not compared.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from remora.engine.models.architectures import ARCHITECTURES, parse_config
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel

FILE = Path(__file__).parent / "published.jsonl"
PUBLISHED = {entry["name"]: entry for entry in map(json.loads, FILE.read_text().splitlines())}
# Of these transformers has no class, or another one than the checkpoint was made with.
NOT_IN_TRANSFORMERS = {"internlm2", "internlm3", "minicpm", "baichuan", "chatglm", "kimi_k2"}
OTHERWISE = {
    "Llama-4-Scout-17B-16E-Instruct",  # transformers wants a yes where it has a number
    "Mistral-Small-3.1-24B-Instruct-2503",  # has a head, which transformers' class would tie
}
# Their classes' own defaults describe no model.
NO_MODELS = {"DeepseekV2ForCausalLM", "Glm4MoeForCausalLM"}
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "intermediate_size_mlp",
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "rope_parameters",
}
KINDS = {
    name: kind
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    for name in ([names] if isinstance(names, str) else names)
    if name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower() == kind.replace("_", "")
}
KINDS |= {"Gemma3ForCausalLM": "gemma3_text", "Llama4ForCausalLM": "llama4_text"}


def filled(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config with all that transformers' class adds to it."""
    kept = {key: value for key, value in raw.items() if key != "architectures"}
    config = AutoConfig.for_model(**kept).to_dict()
    return {**json.loads(json.dumps(config)), "architectures": raw["architectures"]}


def parsed(raw: dict[str, Any]) -> DecoderConfig:
    return replace(parse_config(raw), eos_token_ids=())


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each["parameters"]])
def test_a_published_config_makes_a_model_of_the_published_size(name: str) -> None:
    config = parse_config(PUBLISHED[name]["config"])

    model = DecoderModel(config, dtype=torch.bfloat16, device="meta")

    numbers = sum(shard.memory.numel() for shard in model.tensors().values())
    assert numbers == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, each in PUBLISHED.items()
        if each["config"]["model_type"] not in NOT_IN_TRANSFORMERS and name not in OTHERWISE
    ],
)
def test_a_published_config_means_what_transformers_makes_of_it(name: str) -> None:
    raw = {k: v for k, v in PUBLISHED[name]["config"].items() if k != "quantization_config"}

    assert parsed(raw) == parsed(filled(raw))


@pytest.mark.parametrize("architecture", sorted((KINDS.keys() & ARCHITECTURES.keys()) - NO_MODELS))
def test_what_a_config_leaves_out_is_as_in_the_class_of_transformers(architecture: str) -> None:
    whole = filled({"architectures": [architecture], "model_type": KINDS[architecture]})
    said = {key: value for key, value in whole.items() if key in SIZES | {"architectures"}}

    assert parsed(said) == parsed(whole)
