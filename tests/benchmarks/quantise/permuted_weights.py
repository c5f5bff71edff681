"""Writes a copy of a Llama checkpoint with permuted channels: the same function, other groups.

The built-in model's weights were rounded to 4 bits in groups of 32 once, so grids of such groups
fit it better than they fit other models. Permuted hidden, inner and value channels are not in these
groups any more.

    python tests/benchmarks/quantise/permuted_weights.py MODEL OUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def permuted(tensors: dict[str, Tensor], num_layers: int, kv_heads: int, seed: int = 0) -> None:
    """Permute the channels of a Llama model's tensors, in place."""
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)

    hidden = order(tensors["model.norm.weight"].shape[0])
    for layer in range(num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        inner = order(tensors[f"{mlp}up_proj.weight"].shape[0])
        for name in ("gate_proj", "up_proj"):
            tensors[f"{mlp}{name}.weight"] = tensors[f"{mlp}{name}.weight"][inner]
        tensors[f"{mlp}down_proj.weight"] = tensors[f"{mlp}down_proj.weight"][:, inner]
        value, out = f"{attention}v_proj.weight", f"{attention}o_proj.weight"
        size = len(tensors[value]) // kv_heads
        places = torch.stack([head * size + order(size) for head in range(kv_heads)])
        group = tensors[out].shape[1] // len(tensors[value])
        within = places - size * torch.arange(kv_heads)[:, None]
        heads = torch.arange(kv_heads * group)[:, None] * size
        tensors[value] = tensors[value][places.flatten()]
        tensors[out] = tensors[out][:, (heads + within.repeat_interleave(group, 0)).flatten()]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight")):
            tensors[name] = tensor[hidden]
        else:
            tensors[name] = tensor[:, hidden]


def write_permuted(path: Path, out: Path) -> None:
    """Write the permuted copy of the Llama checkpoint at `path` to a new folder."""
    shutil.copytree(path, out)
    raw = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    permuted(tensors, raw["num_hidden_layers"], raw["num_key_value_heads"])
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )


if __name__ == "__main__":
    write_permuted(Path(sys.argv[1]), Path(sys.argv[2]))
