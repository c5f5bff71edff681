"""Whole checkpoints: what is written decodes to what later blocks were calibrated on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.decoder import DecoderBlock
from remora.engine.quantise.blocks import Calibration
from remora.engine.quantise.checkpoint import METHODS, Method, Recipe, quantise_checkpoint
from remora.engine.quantise.source import Checkpoint
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.models.families import make_family
from tests.engine.models.logits import NUM_TOKENS, make_ids
from tests.engine.models.paged_model import PagedModel

WINDOWS = [make_ids(40), make_ids(33)[::-1], make_ids(21)]
EXPERTS = {"moe_intermediate_size": 64}
LATENTS = {**EXPERTS, "q_lora_rank": 64, "v_head_dim": 16}
TINY: dict[str, dict[str, Any]] = {
    "llama-bias": {},
    "qwen3-moe": EXPERTS,
    "deepseek-v3": LATENTS,
}
# Fused q, k and v in groups and with biases, fused gate and up, norms less 1, parallel parts.
OTHERS = ("internlm2", "gpt-neox", "phi3", "gemma", "cohere")


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(
    tiny_checkpoints: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`checkpoint(family)` returns the folder of a tiny model."""

    @cache
    def make(family: str) -> Path:
        if family in OTHERS:
            return make_family(tmp_path_factory.mktemp("family"), family)[0]
        return tiny_checkpoints(family, **TINY.get(family, {}))

    return make


def quantise(path: Path, out: Path, method: Method = "gptq", bits: int = 4, **more: Any) -> Path:
    recipe = Recipe(method=method, bits=bits, **more)
    quantise_checkpoint(Checkpoint(path), out, recipe, WINDOWS, show_progress=False)
    return out


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("family", [*TINY, *OTHERS])
def test_what_is_written_is_what_later_blocks_were_calibrated_on(
    family: str,
    method: Method,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated: dict[str, Tensor] = {}
    plain_advance = Calibration.advance

    def advance(self: Calibration, layer: int, block: DecoderBlock) -> None:
        named = block.tensors(f"model.layers.{layer}.")
        simulated.update((name, shard.memory.clone()) for name, shard in named)
        plain_advance(self, layer, block)

    monkeypatch.setattr(Calibration, "advance", advance)

    out = quantise(checkpoint(family), tmp_path / "out", method)

    model = load(out)
    read = {name: shard.memory for name, shard in model.tensors().items()}
    assert simulated.keys() < read.keys()
    assert [name for name in simulated if not torch.equal(simulated[name], read[name])] == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3-moe"])
def test_eight_bits_change_logits_little(
    family: str, method: Method, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path, ids = checkpoint(family), make_ids(NUM_TOKENS)

    out = quantise(path, tmp_path / "out", method, bits=8)

    exact, found = (PagedModel(load(each)).step(a=ids)["a"] for each in (path, out))
    assert (found - exact).abs().median() < 0.05 * exact.std()


def test_files_follow_the_format(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = tiny_checkpoints("llama")

    out = quantise(path, tmp_path / "out", "round", group_size=32)

    before, after = (load_file(each / "model.safetensors") for each in (path, out))
    module = "model.layers.1.mlp.down_proj"
    found = {name: tensor for name, tensor in after.items() if name.startswith(module)}
    assert {
        name.removeprefix(module): (each.dtype, each.shape) for name, each in found.items()
    } == {
        ".weight_packed": (torch.int32, (96, 16)),
        ".weight_scale": (torch.float32, (96, 4)),
        ".weight_shape": (torch.int64, (2,)),
        ".weight_zero_point": (torch.int32, (12, 4)),
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized"
    assert settings["ignore"] == ["lm_head"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert {file.name for file in out.iterdir()} == {file.name for file in path.iterdir()}
    assert not list(tmp_path.glob(".*"))


def test_packed_codes_follow_the_formula(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    out = quantise(tiny_checkpoints("llama"), tmp_path / "out", "round", group_size=32)

    stored = load_file(out / "model.safetensors")
    module = "model.layers.0.self_attn.k_proj"
    words, zeros = stored[f"{module}.weight_packed"], stored[f"{module}.weight_zero_point"]
    scales = stored[f"{module}.weight_scale"]
    outputs, inputs = stored[f"{module}.weight_shape"].tolist()
    expected = torch.empty(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            group = column // 32
            code = int(words[row, column // 8]) >> 4 * (column % 8) & 15
            zero = int(zeros[row // 8, group]) >> 4 * (row % 8) & 15
            expected[row, column] = (code - zero) * scales[row, group]
    assert torch.equal(dict(load(out).tensors())[f"{module}.weight"].memory, expected)


def test_experts_list_their_router(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    out = quantise(checkpoint("qwen3-moe"), tmp_path / "out", "round")

    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.gate" in ignored
    assert "lm_head" in ignored


def test_groups_that_do_not_fit_are_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="possible group sizes: 32"):
        quantise(tiny_checkpoints("llama"), tmp_path / "out", group_size=64)
    assert not list(tmp_path.iterdir())


def test_a_quantised_checkpoint_is_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    out = quantise(tiny_checkpoints("llama"), tmp_path / "out", "round")

    with pytest.raises(ConfigError, match="quantised already"):
        Checkpoint(out)


def test_an_existing_folder_is_refused(tiny_checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        quantise(tiny_checkpoints("llama"), tmp_path)


def test_nothing_remains_after_an_error(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Calibration, layer: int, block: DecoderBlock) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr(Calibration, "advance", fail)

    with pytest.raises(ConfigError):
        quantise(tiny_checkpoints("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())
