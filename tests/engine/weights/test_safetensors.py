import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.configs.errors import ConfigError
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import load_model
from remora.engine.weights.files import INDEX_ENDING, SAFETENSORS
from remora.engine.weights.loader import fill
from remora.engine.weights.safetensors import SafetensorsWeights
from tests.conftest import TinyCheckpoints

SINGLE, INDEX = SAFETENSORS.single, f"{SAFETENSORS.single}{INDEX_ENDING}"


def load(path: Path) -> DecoderModel:
    return load_model(
        path, dtype=torch.float32, load_format="auto", device="cpu", show_progress=False
    )


def copy_with(checkpoint: Path, folder: Path, **changes: torch.Tensor | None) -> Path:
    """Copy a checkpoint with tensors replaced or added, or removed (None)."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / SINGLE) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / SINGLE)
    return folder


def test_shards_give_the_same_weights_as_one_file(tiny_checkpoints: TinyCheckpoints) -> None:
    whole = tiny_checkpoints("llama")
    sharded = tiny_checkpoints("llama", max_shard_size="200KB")
    assert (sharded / INDEX).is_file()
    assert not (sharded / SINGLE).exists()

    one, many = load(whole).tensors(), load(sharded).tensors()

    assert one.keys() == many.keys()
    assert all(torch.equal(one[name].memory, many[name].memory) for name in one)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(
    stored: torch.dtype, wanted: torch.dtype, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("llama", dtype=stored)

    model = DecoderModel(read_config(path), dtype=wanted, device="cpu")
    tensors = model.tensors()

    fill(tensors, SafetensorsWeights(path), show_progress=False)

    expected = load_file(path / SINGLE)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name].memory, expected[name].to(wanted)) for name in tensors)


def test_one_error_names_everything_that_does_not_fit(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    changes = {
        "model.norm.weight": None,
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(5, 96),
        "model.layers.0.mlp.router.weight": torch.zeros(2),
    }
    path = copy_with(tiny_checkpoints("llama"), tmp_path / "model", **changes)

    with pytest.raises(ConfigError) as caught:
        load(path)

    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "not part of the model: model.layers.0.mlp.router.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight is [5, 96] instead of [32, 96]" in message


def test_many_missing_tensors_are_counted_not_listed(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoints("llama"), path)
    save_file({}, path / SINGLE)

    with pytest.raises(ConfigError, match=r"lm_head\.weight, .* and 22 more"):
        load(path)


def test_rotary_frequencies_and_a_tied_head_in_the_file_are_no_error(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    changes = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(512, 96),
    }

    path = copy_with(tiny_checkpoints("qwen2.5-tied"), tmp_path / "model", **changes)

    assert "lm_head.weight" not in load(path).tensors()


def test_pickles_are_refused_with_the_reason(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoints("llama") / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle: .*load_format: pt"):
        load(tmp_path)
