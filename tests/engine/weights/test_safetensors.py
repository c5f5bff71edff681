import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.weights.files import INDEX_ENDING, SAFETENSORS
from remora.engine.weights.loader import fill
from remora.engine.weights.safetensors import SafetensorsWeights
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load

SINGLE, INDEX = SAFETENSORS.single, f"{SAFETENSORS.single}{INDEX_ENDING}"


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


def test_rotary_frequencies_and_a_tied_head_in_the_file_are_no_error(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoints("qwen2.5-tied"), tmp_path, dirs_exist_ok=True)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(512, 96),
    }
    save_file(load_file(tmp_path / SINGLE) | more, tmp_path / SINGLE)

    assert "lm_head.weight" not in load(tmp_path).tensors()
