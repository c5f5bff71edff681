"""Checkpoints as GGUF files, written as the converters of llama.cpp do.

Names come from the gguf package's own tables; the changes to values are said here once more, so
that nothing of our reader is compared with itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

Change = Callable[[str, Tensor, dict[str, Any]], dict[str, Tensor]]
Encode = Callable[[npt.NDArray[np.float32], gguf.GGMLQuantizationType], npt.NDArray[Any]]

LAYER = re.compile(r"(?:.*\.)?(?:layers|h)\.(\d+)\.")
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")
HEAD_NORM = re.compile(r"(.*_layernorm)\.norms\.(\d+)\.(.*)")
NOTHING: Mapping[str, Any] = {}
# What is written of a config: GGUF's key and the names that families have for it.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("ffn_hidden_size", "intermediate_size"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("n_routed_experts", "num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
YARN = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def unchanged(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    return {name: values}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    name:      of GGUF
    model:     transformers' model_type
    settings:  of its config, beside COMMON
    metadata:  what the converter writes beside what it writes of all kinds
    change:    what it does to tensors
    rename:    of tensors, before GGUF's tables are asked
    extra:     tensors that it makes of settings
    """

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    change: Change = unchanged
    rename: dict[str, str] = field(default_factory=dict)
    extra: dict[str, list[float]] = field(default_factory=dict)


@contextmanager
def writing(
    file: Path, name: str, metadata: Mapping[str, Any] = NOTHING, *, max_tensors: int = 0
) -> Iterator[gguf.GGUFWriter]:
    """Write a GGUF file with what is added to the writer.

    metadata:     settings of the model `name`; those of None are left out
    max_tensors:  in each file; 0 = one file with all
    """
    writer = gguf.GGUFWriter(file, name, split_max_tensors=max_tensors)
    add_settings(writer, {f"{name}.{key}": value for key, value in metadata.items()})
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_settings(writer: gguf.GGUFWriter, settings: Mapping[str, Any]) -> None:
    """Add settings by their whole names, except those of None."""
    for key, value in settings.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def convert(
    kind: Kind,
    folder: Path,
    file: Path,
    *,
    stored_as: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    encode: Encode = gguf.quantize,
    max_tensors: int = 0,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a Hugging Face folder as a GGUF file.

    stored_as:  the type of matrices; other tensors are float32
    encode:     makes the content of matrices
    add:        adds further content
    """
    raw = json.loads((folder / "config.json").read_text())
    metadata = _of_all(raw) | kind.metadata
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind.name], metadata["block_count"])
    with writing(file, kind.name, metadata, max_tensors=max_tensors) as writer:
        add(writer)
        for name, values in stacked(load_file(folder / "model.safetensors")).items():
            for changed, part in kind.change(name, values.float(), raw).items():
                short = changed
                if not changed.startswith("blk."):
                    for old, new in kind.rename.items():
                        short = short.replace(old, new)
                    found = names.get_name(short, try_suffixes=(".weight", ".bias"))
                    assert found is not None, changed
                    short = found
                is_matrix = part.ndim == 2
                of_type = stored_as if is_matrix else gguf.GGMLQuantizationType.F32
                data = (encode if is_matrix else gguf.quantize)(part.contiguous().numpy(), of_type)
                writer.add_tensor(short, data, raw_dtype=of_type)
        for name, divisors in kind.extra.items():
            writer.add_tensor(name, torch.tensor(divisors).numpy())
    return file


def _of_all(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what is written of all kinds; None where a config does not have it."""
    found: dict[str, Any] = {}
    for key, names in WRITTEN.items():
        given = (raw[name] for name in names if raw.get(name) is not None)
        found[key] = next(given, None)
    rope, size = raw.get("rope_parameters") or {}, raw.get("head_dim")
    found["rope.freq_base"] = rope.get("rope_theta")
    if "partial_rotary_factor" in rope:
        size = size or raw["hidden_size"] // raw["num_attention_heads"]
        found["rope.dimension_count"] = int(size * rope["partial_rotary_factor"])
    if rope.get("rope_type") == "yarn":
        found |= {f"rope.scaling.{key}": rope.get(name) for key, name in YARN.items()}
    return found


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the experts of a layer, and the norms of heads, into one tensor each."""
    found: dict[str, Any] = {}
    for name, values in sorted(tensors.items(), key=lambda item: _by_number(item[0])):
        expert, norm = EXPERT.fullmatch(name), HEAD_NORM.fullmatch(name)
        if expert is not None:
            found.setdefault(f"{expert[1]}.experts.{expert[3]}", []).append(values)
        elif norm is not None:
            found.setdefault(f"{norm[1]}.{norm[3]}", []).append(values)
        else:
            found[name] = values
    return {
        name: torch.stack(value) if isinstance(value, list) else value
        for name, value in found.items()
    }


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _block(name: str, part: str) -> str:
    """Return GGUF's name of a part of the layer that a tensor is of."""
    layer = LAYER.match(name)
    assert layer is not None
    return f"blk.{layer[1]}.{part}"


def _interleaved(values: Tensor, num_heads: int) -> Tensor:
    """Order rows for rotation of neighbours: row 2i is i, row 2i + 1 is i + dim / 2."""
    pairs = values.view(num_heads, 2, -1, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def permuted(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    if re.search(r"\.[qk]_proj\.", name):
        heads = raw["num_attention_heads" if ".q_" in name else "num_key_value_heads"]
        values = _interleaved(values, heads)
    return {name: values}


def plus_one(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    return {name: values + 1 if name.endswith("norm.weight") else values}


def flat_gate(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    return {name: values.squeeze() if name.endswith("shared_expert_gate.weight") else values}


def granite_moe(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    for whole, part in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp")):
        if f"{whole}.input_linear" in name:
            gate, up = values.chunk(2, dim=-2)
            return {
                _block(name, f"ffn_gate_{part}.weight"): gate,
                _block(name, f"ffn_up_{part}.weight"): up,
            }
    return permuted(name, values, raw)


def transposed(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    is_turned = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return {name: values.t() if is_turned else values}


def neox_qkv(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    if "query_key_value" in name:
        heads = values.view(raw["num_attention_heads"], 3, -1, *values.shape[1:])
        values = heads.transpose(0, 1).reshape(values.shape)
    return {name: values}


def falcon_qkv(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    if "query_key_value" in name:
        size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
        groups = raw["num_kv_heads"] if raw["new_decoder_architecture"] else 1
        rows = values.view(groups, num_heads // groups + 2, size // num_heads, size)
        parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
        values = torch.cat([part.reshape(-1, size) for part in parts])
    return {name: values}


def fused_experts(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    """GPT-OSS and Llama 4: [E, H, 2 * I]; the former has gates and ups by turns."""
    by_turns = raw["model_type"] == "gpt_oss"
    if name.endswith("sinks"):
        return {_block(name, "attn_sinks.weight"): values}
    if ".experts." not in name:
        return {name: values}
    suffix = "bias" if name.endswith("_bias") else "weight"
    rows = values.transpose(-1, -2) if suffix == "weight" else values
    if "down_proj" in name:
        return {_block(name, f"ffn_down_exps.{suffix}"): rows}
    if by_turns:
        gate, up = rows[:, ::2], rows[:, 1::2]
    else:
        gate, up = rows.chunk(2, dim=1)
    return {
        _block(name, f"ffn_gate_exps.{suffix}"): gate,
        _block(name, f"ffn_up_exps.{suffix}"): up,
    }


def corrected(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    if name.endswith("e_score_correction_bias"):
        return {_block(name, "exp_probs_b.bias"): values}
    return {name: values}


def latent_halves(name: str, values: Tensor, raw: dict[str, Any]) -> dict[str, Tensor]:
    """Cut what makes keys and values apart, and turn the former."""
    if not name.endswith("kv_b_proj.weight"):
        return corrected(name, values, raw)
    key = raw["qk_nope_head_dim"]
    heads = values.view(raw["num_attention_heads"], key + raw["v_head_dim"], -1)
    return {
        _block(name, "attn_k_b.weight"): heads[:, :key].transpose(1, 2),
        _block(name, "attn_v_b.weight"): heads[:, key:],
    }
