"""Models that cannot run on our KV cache: refused with the reason, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from remora.configs.errors import ConfigError
from remora.engine.fallback.structure import read_structure
from remora.engine.models.checkpoint import read_raw_config
from tests.engine.fallback.checkpoints import COMMON
from tests.engine.fallback.conftest import Checkpoints
from tests.engine.fallback.test_parity import load

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("MambaForCausalLM", {}, "keeps state other than keys and values"),
    "jamba": ("JambaForCausalLM", {}, "keeps state other than keys and values"),
    "bloom": ("BloomForCausalLM", {}, "does not let its attention be replaced"),
    "bert": ("BertLMHeadModel", {}, "a mask is neither causal nor a sliding window"),
    "t5": ("T5ForConditionalGeneration", {}, "is no causal language model"),
    "llava": ("LlavaForConditionalGeneration", {}, "is no causal language model"),
    "gemma4_text": ("Gemma4ForCausalLM", {}, "KV heads of several shapes"),
    "llama": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rotation of the type dynamic depends on what else is in the batch",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_our_cache_cannot_serve_is_refused(family: str, tmp_path: Path) -> None:
    architecture, settings, says = REFUSED[family]
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    raw = CONFIG_MAPPING[family](**settings).to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))

    with pytest.raises(ConfigError, match=says):
        read_structure(tmp_path, read_raw_config(tmp_path), trust_code=False)


def test_a_type_that_nobody_knows_is_told_as_such(tmp_path: Path) -> None:
    raw = {**COMMON, "model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}

    with pytest.raises(ConfigError, match=r"neither remora nor transformers .* knows .* 'nobodys'"):
        read_structure(tmp_path, raw, trust_code=False)


def test_layers_that_mix_tokens_on_their_own_are_found(checkpoints: Checkpoints) -> None:
    model = load(checkpoints("helium"))
    layer = model._ends.decoder.layers[1]

    class Shifting(nn.Module):
        """Adds what the token before has."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = plain(hidden + hidden.roll(1, dims=1))
            return mixed

    plain = layer.mlp
    layer.mlp = Shifting()

    with pytest.raises(ConfigError, match="more than attention does from token to token"):
        model.check()


def test_a_tensor_that_is_missing_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoints("helium")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)
