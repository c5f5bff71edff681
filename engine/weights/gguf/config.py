"""Builds the equivalent config.json from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf.families import family_of
from remora.engine.weights.gguf.family import (
    GGUFFamily,
    decimal,
    head_dim,
    num_layers,
    refused,
    whole,
)
from remora.engine.weights.gguf.file import GGUFFile, read_gguf
from remora.engine.weights.gguf.names import EMBEDDING
from remora.engine.weights.gguf.rope import rope_of

# Settings that change what a model computes, with the values that change nothing.
MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "deepstack_mapping": (),
    "rope.dimension_sections": (),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
}


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return the config.json that corresponds to a GGUF file's metadata. Raises ConfigError."""
    file = read_gguf(path)
    family = family_of(file)
    _refuse_unknown(file, family)
    if EMBEDDING not in file.shapes:
        raise ConfigError(f"{path} has no tensor {EMBEDDING}, so it is no language model.")
    num_heads = whole(file, "attention.head_count")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": file.shapes[EMBEDDING][0],
        "hidden_size": whole(file, "embedding_length"),
        "intermediate_size": whole(file, "feed_forward_length", 0),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": whole(file, "attention.head_count_kv", num_heads),
        "head_dim": head_dim(file),
        "hidden_act": "silu",
        "max_position_embeddings": whole(file, "context_length"),
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_parameters": rope_of(file, head_dim(file)),
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "attention_bias": "blk.0.attn_output.bias" in file.shapes,
        "bos_token_id": file.token_setting("bos_token_id"),
        "eos_token_id": file.token_setting("eos_token_id"),
        "pad_token_id": file.token_setting("padding_token_id"),
        **family.settings(file),
    }


def _refuse_unknown(file: GGUFFile, family: GGUFFamily) -> None:
    for key, harmless in MEANINGLESS.items():
        value = file.setting(key)
        if value is not None and value not in harmless and key not in family.understands:
            raise refused(
                file,
                f"has {file.architecture}.{key} = {value!r}, which is not known for "
                f"{family.architecture}",
            )
