"""Checkpoints of few bits are what their plain copies are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.architectures import parse_config
from remora.engine.models.load import open_weights
from remora.engine.weights.formats.mxfp4 import powers_of_two
from remora.kernels.quantised.weight_kinds import E2M1, Float4Weight
from tests.conftest import TinyCheckpoints
from tests.engine.weights.formats.checkpoints import pack_gpt_oss


def change(path: Path, to: Path, quantization: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a copy of a checkpoint with other tensors and a quantization_config."""
    shutil.copytree(path, to)
    raw = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    save_file(tensors, to / "model.safetensors")
    return to


def read(path: Path) -> dict[str, Tensor]:
    source = open_weights(path, "auto")
    return {name: tensor.clone() for name, tensor in source.read(source.shapes())}


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    kind = Float4Weight(values=blocks.flatten(-2), scales=powers_of_two(scales))
    return kind.dequantised().transpose(1, 2)


def test_four_bits_are_numbers_of_the_table_times_a_power_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, 3, 2), generator=generator, dtype=torch.uint8)

    plain = unpack_mxfp4(blocks, scales)

    assert plain.shape == (2, 64, 3)
    for expert, inner, output in [(0, 0, 0), (1, 33, 2), (0, 63, 1), (1, 14, 0)]:
        byte = int(blocks[expert, output, inner // 32, inner % 32 // 2])
        bits = byte & 15 if inner % 2 == 0 else byte >> 4
        value = E2M1[bits & 7] * (-1 if bits & 8 else 1)
        exponent = int(scales[expert, output, inner // 32]) - 127
        assert plain[expert, inner, output] == value * 2.0**exponent


def test_gpt_oss_of_four_bits_loads_as_its_plain_copy(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("gpt-oss", num_hidden_layers=1)

    of_few_bits, unquantised = pack_gpt_oss(path, tmp_path)

    found, expected = read(of_few_bits), read(unquantised)

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_float8_in_blocks_loads_as_its_plain_copy(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("deepseek-v3", num_hidden_layers=2)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.q_b_proj.weight"  # more rows than a block has
    values, scales = stored[name].to(torch.float8_e4m3fn), torch.tensor([[0.5], [4.0]])
    stored |= {name: values, f"{name}_scale_inv": scales}

    found = read(change(path, tmp_path / "fp8", FP8, stored))

    expected = values.float()
    expected[:128] *= 0.5
    expected[128:] *= 4.0
    assert torch.equal(found[name], expected)
    assert f"{name}_scale_inv" not in found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "quantization_config of hqq, which is not read; formats read"),
        ({"quant_method": "fp8", "weight_block_size": 64}, "weight_block_size 64; expected two"),
    ],
)
def test_other_formats_are_refused(
    settings: dict[str, Any], message: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    raw = json.loads((tiny_checkpoints("deepseek-v3") / "config.json").read_text())

    with pytest.raises(ConfigError, match=message):
        parse_config({**raw, "quantization_config": settings})
