"""Damaged tensors and settings of each format: one ConfigError that names the tensor or setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import SAMPLES

MODULE = "model.layers.0.mlp.down_proj"
Damage = Callable[[Tensor], Tensor]


def as_floats(tensor: Tensor) -> Tensor:
    return tensor.float()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.float().to(torch.int8)


def flat(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def doubled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.flatten(), tensor.flatten()])


def starting(value: float) -> Damage:
    """Replace the first number."""

    def damage(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.flatten()[0] = value
        return changed

    return damage


def wide(value: int) -> Damage:
    """Store whole numbers of a byte in 32 bits, the first replaced by one that needs more."""

    def damage(tensor: Tensor) -> Tensor:
        return starting(value)(tensor.int())

    return damage


DAMAGES: Mapping[str, tuple[str, str, Damage, str]] = {
    "awq flat words": ("awq", "qweight", flat, r"expected two dimensions"),
    "awq words of floats": ("awq", "qweight", as_floats, r"words are float32; expected int32"),
    "awq zeros of floats": ("awq", "qzeros", as_floats, r"words are float32; expected int32"),
    "awq whole scales": ("awq", "scales", as_bytes, r"scales are stored as int8"),
    "gemv flat zeros": ("awq-gemv", "qzeros", flat, r"expected two dimensions"),
    "gptq flat words": ("gptq-v1", "qweight", flat, r"expected two dimensions"),
    "gptq flat zeros": ("gptq-v1", "qzeros", flat, r"expected two dimensions"),
    "gptq flat scales": ("gptq-v1", "scales", flat, r"expected two dimensions"),
    "gptq infinite scale": ("gptq-v1", "scales", starting(float("inf")), r"a scale is infinite"),
    "gptq group below 0": ("gptq-act-order", "g_idx", starting(-1), r"a group is outside of the"),
    "gptq group too high": ("gptq-act-order", "g_idx", starting(99), r"a group is outside of the"),
    "packed flat words": ("ct-packed", "weight_packed", flat, r"expected two dimensions"),
    "packed words of floats": ("ct-packed", "weight_packed", as_floats, r"words are float32"),
    "packed size of three": ("ct-packed", "weight_shape", doubled, r"expected \[2\]"),
    "packed scale": ("ct-packed", "weight_scale", starting(float("nan")), r"a scale is infinite"),
    "whole zeros": ("ct-bytes-g64-short", "weight_zero_point", as_floats, r"zeros are float32s"),
    "zero too high": (
        "ct-bytes-g64-short",
        "weight_zero_point",
        wide(128),
        r"zeros lie in \[-128, 128\]; those of 8 bits lie in \[-128, 127\]",
    ),
    "zero too low": (
        "ct-bytes-g64-short",
        "weight_zero_point",
        wide(-129),
        r"lie in \[-129, 127\]",
    ),
    "torchao zero": ("torchao-int8-zeros", "_weight_zero_point", wide(999), r"in \[-\d+, 999\]"),
    "int8 of floats": ("ct-int8", "weight", as_floats, r"stored as float32; expected uint8 or"),
    "nvfp4 two divisors": ("ct-nvfp4", "weight_global_scale", doubled, r"expected \[\] or \[1\]"),
    "nvfp4 divisor of 0": ("ct-nvfp4", "weight_global_scale", starting(0), r"a scale is infinite"),
    "nvfp4 flat values": ("ct-nvfp4", "weight_packed", flat, r"expected two dimensions"),
    "modelopt two factors": ("modelopt-nvfp4", "weight_scale_2", doubled, r"expected \[\] or"),
    "float8 flat": ("fp8-blocks", "weight", flat, r"not part of|expected two dimensions|instead"),
    "float8 as floats": ("fp8-tensor", "weight", as_floats, r"stored as float32; expected float8"),
    "float8 that is no number": (
        "fp8-tensor",
        "weight",
        starting(float("nan")),
        r"a weight is infinite or not a number",
    ),
    "nf4 values": ("bnb-nf4", "weight", as_bytes, r"stored as int8; expected uint8"),
    "nf4 scales": ("bnb-nf4", "weight.absmax", starting(float("nan")), r"a scale is infinite"),
    "nf4 table": ("bnb-nf4", "weight.quant_map", starting(float("nan")), r"its table is infinite"),
    "bnb flat": ("bnb-int8", "weight", flat, r"expected two dimensions"),
    "bnb whole scales": ("bnb-int8", "SCB", starting(float("inf")), r"a scale is infinite"),
    "torchao flat": ("torchao-int8", "_weight_qdata", flat, r"expected two dimensions"),
    "torchao scales": ("torchao-int8", "_weight_scale", starting(float("nan")), r"a scale is inf"),
}


@pytest.fixture
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    torch.manual_seed(0)
    return tiny_checkpoints("llama", hidden_size=96, intermediate_size=192, num_hidden_layers=1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_named(damage: str, llama: Path, tmp_path: Path) -> None:
    name, ending, change, message = DAMAGES[damage]
    quantised, _ = quantise(llama, tmp_path, SAMPLES[name])
    stored = load_file(quantised / "model.safetensors")
    tensor = f"{MODULE}.{ending}"
    stored[tensor] = change(stored[tensor]).contiguous()
    save_file(stored, quantised / "model.safetensors")

    with pytest.raises(ConfigError, match=rf"(?s)down_proj.*({message})"):
        load(quantised)


def test_numbers_beyond_their_bits_are_refused(llama: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES["ct-bytes-g64-short"])
    change(quantised, lambda groups: groups["group_0"]["weights"].update(num_bits=4))

    with pytest.raises(ConfigError, match=r"_proj\.weight .*: numbers lie in \[-.* of 4 bits"):
        load(quantised)


@pytest.mark.parametrize("value", [0, -2, "64", 6.5])
@pytest.mark.parametrize("name", ["awq", "gptq-v1", "ct-packed", "ct-bytes-g64-short"])
def test_impossible_sizes_of_groups_are_named(
    name: str, value: Any, llama: Path, tmp_path: Path
) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES[name])
    file = quantised / "config.json"
    raw = json.loads(file.read_text())
    groups = raw["quantization_config"].get("config_groups")
    (groups["group_0"]["weights"] if groups else raw["quantization_config"])["group_size"] = value
    file.write_text(json.dumps(raw))

    with pytest.raises(ConfigError, match=rf"config\.json: group_size is {value!r}; expected"):
        load(quantised)


def change(checkpoint: Path, alter: Callable[[dict[str, Any]], None]) -> None:
    """Change the groups in a checkpoint's settings."""
    file = checkpoint / "config.json"
    raw = json.loads(file.read_text())
    alter(raw["quantization_config"]["config_groups"])
    file.write_text(json.dumps(raw))
