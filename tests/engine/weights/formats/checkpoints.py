"""Writes quantised copies of checkpoints, and their dequantised twins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.weights.formats.writers import Sample, mxfp4

QUANTISED = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def rewrite(
    path: Path, to: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor], **keys: Any
) -> Path:
    """Write a copy of a checkpoint with other tensors and settings."""
    shutil.copytree(path, to)
    raw = json.loads((to / "config.json").read_text())
    raw |= {"quantization_config": settings} if settings else {}
    (to / "config.json").write_text(json.dumps({**raw, **keys}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors"
    )
    return to


def quantise(
    path: Path, to: Path, sample: Sample, endings: tuple[str, ...] = QUANTISED
) -> tuple[Path, Path]:
    """Write a checkpoint with quantised modules, and its dequantised copy; return both paths."""
    stored = load_file(path / "model.safetensors")
    plain = dict(stored)
    for name in sorted(stored):
        module = name.removesuffix(".weight")
        if not module.endswith(endings):
            continue
        outputs, inputs = stored.pop(name).shape
        parts, plain[name] = sample.write(outputs, inputs)
        stored |= {f"{module}.{ending}": tensor for ending, tensor in parts.items()}
        stored |= {f"{module}.{ending}": torch.ones(1) for ending in sample.extra}
    return (
        rewrite(path, to / "quantised", sample.settings, stored),
        rewrite(path, to / "plain", {}, plain),
    )


def pack_gpt_oss(path: Path, to: Path) -> tuple[Path, Path]:
    """Write a checkpoint of GPT-OSS with experts in MXFP4, and its dequantised copy."""
    stored = load_file(path / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if name.endswith(("_up_proj", "down_proj"))]:
        number, inputs, outputs = stored.pop(name).shape
        parts, numbers = mxfp4(number * outputs, inputs)
        blocks = parts["weight_packed"].view(number, outputs, inputs // 32, 16)
        scales = parts["weight_scale"].view(number, outputs, inputs // 32)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = numbers.view(number, outputs, inputs).transpose(1, 2)
    return (
        rewrite(path, to / "quantised", {"quant_method": "mxfp4"}, stored),
        rewrite(path, to / "plain", {}, plain),
    )
