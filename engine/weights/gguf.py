"""Weights and config in GGUF files, under Hugging Face names and in Hugging Face order.

Quantised blocks are dequantised one tensor at a time. What else differs from a Hugging Face folder
stands in `gguf_families.py`: names; the config, which is metadata; rows of q and k, which some
kinds keep in the order of interleaved rotation; and experts, which lie in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf_families import (
    EMBEDDING,
    GGUFFamily,
    family_of,
    hugging_face_name,
    shortest,
)
from remora.engine.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf

ROPE_DIVISORS = "rope_freqs.weight"


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return the config.json that a GGUF file's metadata amounts to. Raises ConfigError."""
    file = read_gguf(path)
    family = family_of(file)
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if EMBEDDING not in shapes:
        raise ConfigError(f"{path} has no tensor {EMBEDDING}, so it is no language model.")
    num_heads = file.setting("attention.head_count")
    head_dim = file.setting("attention.key_length")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shapes[EMBEDDING][0],
        "hidden_size": file.setting("embedding_length"),
        "intermediate_size": file.setting("feed_forward_length"),
        "num_hidden_layers": file.setting("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.setting("attention.head_count_kv", num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": file.setting("context_length"),
        "rms_norm_eps": shortest(file.setting("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "bos_token_id": file.token_setting("bos_token_id"),
        "eos_token_id": file.token_setting("eos_token_id"),
        "pad_token_id": file.token_setting("padding_token_id"),
        **({} if head_dim is None else {"head_dim": head_dim}),
        **family.settings(file),
    }


def _rope(file: GGUFFile) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": shortest(file.setting("rope.freq_base", 10_000.0))}
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


class GGUFWeights:
    """WeightSource over the tensors of a GGUF model, the largest first.

    What a tensor takes beside the weights while it is read is then less than what is still to come.

    dtype:        of tensors that are dequantised
    num_threads:  that dequantise
    """

    def __init__(
        self, path: Path, *, dtype: torch.dtype = torch.float32, num_threads: int = 1
    ) -> None:
        self.label = path.name
        self._dtype, self._num_threads = dtype, num_threads
        file = read_gguf(path)
        self._family = family_of(file)
        self._permuted_heads: dict[str, int] = {}
        if self._family.is_permuted:
            num_heads = file.setting("attention.head_count")
            num_kv_heads = file.setting("attention.head_count_kv", num_heads)
            self._permuted_heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        named = [
            (name, tensor)
            for stored in file.tensors
            if stored.name != ROPE_DIVISORS
            for name, tensor in _named(stored, self._family)
        ]
        named.sort(key=lambda pair: math.prod(pair[1].shape), reverse=True)
        self._tensors = dict(named)

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
            if num_heads:
                values = half_split_rows(values, num_heads)
            elif self._family.norm_offset and name.endswith("norm.weight"):
                values = values - self._family.norm_offset
            yield name, values


def _named(tensor: GGUFTensor, family: GGUFFamily) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield a tensor under its Hugging Face name, or those of experts that lie in it."""
    name = hugging_face_name(tensor.name, family)
    if name.endswith("shared_expert_gate.weight"):
        yield name, replace(tensor, shape=(1, tensor.shape[-1]))
    elif "{}" in name:
        num_experts, num_bytes = tensor.shape[0], tensor.num_bytes // tensor.shape[0]
        for expert in range(num_experts):
            yield (
                name.format(expert),
                replace(
                    tensor,
                    shape=tensor.shape[1:],
                    offset=tensor.offset + expert * num_bytes,
                    num_bytes=num_bytes,
                ),
            )
    else:
        yield name, tensor


def half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of interleaved rotation: pairs (2i, 2i + 1) become (i, i + dim / 2).

    values:  [num_heads * head_dim, ...]
    """
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
