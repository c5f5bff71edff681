"""LightLLM's file of formats by layer and part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.convert import settings_of
from remora.configs.dialects.translate import State, Translation, translate
from remora.configs.errors import ConfigError


def read(path: Path, content: Any, **others: Any) -> Translation:
    path.write_text(yaml.safe_dump(content))
    return translate(DIALECTS["lightllm"], {"--quant_cfg": str(path), **others})


def test_exceptions_become_overrides(tmp_path: Path) -> None:
    mixed = [
        {"name": "down_proj", "layer_nums": [0, 2], "quant_type": "none"},
        {"name": "qkv_proj", "quant_type": "ao-int4wo-64"},
        {"name": "gate_up_proj", "layer_nums": [1], "quant_type": "ao-int8wo"},
    ]

    found = read(tmp_path / "quant.yaml", {"quant_type": "vllm-w8a8", "mix_bits": mixed})

    settings = settings_of(found.args)
    assert settings["model.quantization"] == "int8"
    assert settings["model.quantization_overrides"] == [
        {"parts": ["down_proj"], "layers": [0, 2], "format": "none"},
        {"parts": ["q_proj", "k_proj", "v_proj"], "format": "int4"},
        {"parts": ["gate_proj", "up_proj"], "layers": [1], "format": "int8"},
    ]
    assert found.lines[0].state is State.APPROXIMATE


@pytest.mark.parametrize(
    ("content", "others", "says"),
    [
        ({"mix_bits": [{"name": "lm_head"}]}, {}, r"mix_bits\[0\]: lm_head is not known"),
        ({"mix_bits": [{"layer_nums": [1]}]}, {}, "expected layer_nums, name, quant_type"),
        (
            {"mix_bits": [{"name": "o_proj", "quant_type": "vllm-fp8w8a8"}]},
            {},
            "vllm-fp8w8a8 is not offered for parts; use none, ao-int8wo",
        ),
        ({"quant": "none"}, {}, "expected the keys quant_type and mix_bits"),
        ({"quant_type": "flashllm-w6a16"}, {}, "6 bits"),
        ({}, {"--quant_type": "ao-int8wo"}, "leave --quant_type out"),
    ],
)
def test_what_a_file_cannot_say_is_refused(
    content: Any, others: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"--quant_cfg = .*refused: .*{says}"):
        read(tmp_path / "quant.yaml", content, **others)
