"""A tiny checkpoint as a GGUF file, laid out the way converters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from remora.engine.weights.gguf.names import BLOCK_NAMES, TOP_NAMES

KINDS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def make_gguf(
    checkpoint: Path,
    file: Path,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    metadata: dict[str, Any] | None = None,
    divisors: list[float] | None = None,
    has_tokenizer: bool = True,
    token_metadata: dict[str, Any] | None = None,
    general: dict[str, Any] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Convert a Hugging Face folder. Matrices are stored in `quantisation`, the rest in float32."""
    raw = json.loads((checkpoint / "config.json").read_text())
    kind = KINDS[raw["model_type"]]
    writer = gguf.GGUFWriter(file, kind, split_max_tensors=max_tensors)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    said = {f"{kind}.{key}": value for key, value in (metadata or {}).items()}
    said |= {f"tokenizer.ggml.{key}": value for key, value in (token_metadata or {}).items()}
    for key, value in (said | (general or {})).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if has_tokenizer:
        _add_tokenizer(writer, checkpoint, pre)
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    names = {str(ours): name for name, ours in (TOP_NAMES | BLOCK_NAMES).items()}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.float()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _interleave(values, raw["head_dim"])
        stored = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(values.numpy(), stored)
        writer.add_tensor(_gguf_name(name, names), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not max_tensors:
        return file
    return min(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, pre: str) -> None:
    stored = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    special = {entry["content"] for entry in stored["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _interleave(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows for interleaved rotation: row 2i is i, row 2i + 1 is i + head_dim / 2."""
    heads = values.view(-1, 2, head_dim // 2, *values.shape[1:])
    return heads.transpose(1, 2).reshape(values.shape).contiguous()


def _gguf_name(name: str, names: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{suffix}"
