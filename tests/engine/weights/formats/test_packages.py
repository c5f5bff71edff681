"""Modules that other packages quantised, read as these packages read them (packages/make.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from remora.engine.weights.formats.source import QuantisedWeights
from remora.engine.weights.safetensors import SafetensorsWeights

# bitsandbytes rounds twice: it multiplies codes with the scale, then with 1 / 127.
ROUNDED_TWICE, TWO_STEPS = "bnb-int8", 2.0**-22
FILES = sorted(Path(__file__).with_name("packages").glob("*.safetensors"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_weights_are_those_of_the_package(file: Path, tmp_path: Path) -> None:
    tensors = load_file(file)
    expected = tensors.pop("expected")
    save_file(tensors, tmp_path / "model.safetensors")
    with safe_open(file, "pt") as opened:
        settings = json.loads(opened.metadata()["settings"])

    source = QuantisedWeights(SafetensorsWeights(tmp_path), settings, expected.dtype)

    ((name, found),) = source.read(source.shapes())
    assert name == "model.layers.0.mlp.down_proj.weight"
    near = TWO_STEPS if file.stem == ROUNDED_TWICE else 0.0
    torch.testing.assert_close(found, expected, rtol=near, atol=0.0)


def test_every_package_is_there() -> None:
    assert {file.stem.split("-")[0] for file in FILES} == {
        "ct",
        "torchao",
        "bnb",
        "awq",
        "gptq",
        "modelopt",
    }
