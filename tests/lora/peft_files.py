"""Adapters written by hand, small, for a model whose tensors are written down here."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from remora.engine.weights.rename_tensors import RenamingRules
from remora.lora.files import CONFIG, WEIGHTS

RANK = 2
AS_NAMED = RenamingRules(())  # of a checkpoint that has our names
SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
}
PREFIX = "base_model.model.model.layers.0.self_attn."


class Base:
    """WeightSource of that model; all zeros."""

    label = "base"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return SHAPES

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, torch.zeros(SHAPES[name])) for name in names)


def make_tensors(
    module: str = "q_proj", outputs: int = 8, *, value: float = 1.0
) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.full((RANK, 8), value),
        f"{PREFIX}{module}.lora_B.weight": torch.full((outputs, RANK), value),
    }


def write_adapter(
    folder: Path, *, tensors: Mapping[str, Tensor] | None = None, **changes: Any
) -> Path:
    """changes: of adapter_config.json"""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / CONFIG).write_text(json.dumps(config | changes))
    save_file(dict(make_tensors() if tensors is None else tensors), folder / WEIGHTS)
    return folder
