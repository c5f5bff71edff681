"""Weights and config in GGUF files, under Hugging Face names and in Hugging Face order.

Quantised blocks are dequantised one tensor at a time. Three things differ from a Hugging
Face folder: names; the rows of Llama's q and k, which GGUF keeps in the order of interleaved
rotation; and the config, which is metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf_file import GGUFFile, read_gguf

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING = "token_embd.weight"
ROPE_DIVISORS = "rope_freqs.weight"


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return the config.json that a GGUF file's metadata amounts to. Raises ConfigError."""
    file = read_gguf(path)
    if file.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{path} holds a model of GGUF architecture {file.architecture!r}; "
            f"known are {', '.join(ARCHITECTURES)}."
        )
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if EMBEDDING not in shapes:
        raise ConfigError(f"{path} has no tensor {EMBEDDING}, so it is no language model.")
    num_heads = file.setting("attention.head_count")
    return {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": shapes[EMBEDDING][0],
        "hidden_size": file.setting("embedding_length"),
        "intermediate_size": file.setting("feed_forward_length"),
        "num_hidden_layers": file.setting("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.setting("attention.head_count_kv", num_heads),
        "head_dim": file.setting("attention.key_length"),
        "hidden_act": "silu",
        "max_position_embeddings": file.setting("context_length"),
        "rms_norm_eps": _shortest(file.setting("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "bos_token_id": file.token_setting("bos_token_id"),
        "eos_token_id": file.token_setting("eos_token_id"),
        "pad_token_id": file.token_setting("padding_token_id"),
    }


def _rope(file: GGUFFile) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": _shortest(file.setting("rope.freq_base", 10_000.0))}
    divisors = [tensor for tensor in file.tensors if tensor.name == ROPE_DIVISORS]
    kind = file.setting("rope.scaling.type", "none")
    if divisors:
        return rope | {"rope_type": "divided", "divisors": divisors[0].read().tolist()}
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": file.setting("rope.scaling.factor")}
    if kind == "yarn":
        original = file.setting("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
    return rope


def _shortest(number: float) -> float:
    """Undo what float32 did to a decimal: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(number)))


class GGUFWeights:
    """WeightSource over the tensors of a GGUF model.

    dtype:        of tensors that are dequantised
    num_threads:  that dequantise
    """

    def __init__(
        self, path: Path, *, dtype: torch.dtype = torch.float32, num_threads: int = 1
    ) -> None:
        self.label = path.name
        self._dtype, self._num_threads = dtype, num_threads
        file = read_gguf(path)
        self._permuted_heads: dict[str, int] = {}
        if file.architecture == "llama":  # Mistral among them; the others keep their rows
            num_heads = file.setting("attention.head_count")
            num_kv_heads = file.setting("attention.head_count_kv", num_heads)
            self._permuted_heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        self._tensors = {
            hugging_face_name(tensor.name): tensor
            for tensor in file.tensors
            if tensor.name != ROPE_DIVISORS
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names."""
        for name, tensor in self._tensors.items():
            if name not in names:
                continue
            values = tensor.read(self._dtype, num_threads=self._num_threads)
            num_heads = self._permuted_heads.get(name.split(".")[-2], 0)
            yield name, half_split_rows(values, num_heads) if num_heads else values


def hugging_face_name(name: str) -> str:
    """Translate a GGUF tensor name; one that we do not know stays as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{suffix}"
    return name


def half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of interleaved rotation: pairs (2i, 2i + 1) become (i, i + dim / 2).

    values:  [num_heads * head_dim, ...]
    """
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
