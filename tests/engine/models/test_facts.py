import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError
from remora.engine.models.facts import read_model_facts
from tests.conftest import TinyCheckpoints


def test_facts_say_what_the_checkpoint_holds(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("qwen3", dtype=torch.bfloat16)

    facts = read_model_facts(path)

    stored = load_file(path / "model.safetensors")
    assert facts.architecture == "Qwen3ForCausalLM"
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads) == (3, 6, 2)
    assert (facts.head_dim, facts.vocab_size, facts.max_position) == (32, 512, 512)
    assert facts.dtype == "bfloat16"
    assert facts.num_parameters == sum(tensor.numel() for tensor in stored.values())


@pytest.mark.parametrize(
    ("file", "dtype"),
    [("model.safetensors", "float16"), ("pytorch_model.bin", "float32"), (None, "bfloat16")],
    ids=["safetensors", "pickle", "no weights"],
)
def test_dtype_comes_from_the_weights_where_the_config_has_none(
    file: str | None, dtype: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama", dtype=torch.float16)
    raw = json.loads((path / "config.json").read_text())
    del raw["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if file is not None:
        (tmp_path / file).symlink_to(path / "model.safetensors")

    assert read_model_facts(tmp_path).dtype == dtype


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent does not exist; expected a folder with config"):
        read_model_facts(tmp_path / "absent")


def test_a_folder_without_config_points_at_the_gguf_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "model-q8.gguf").touch()

    with pytest.raises(ConfigError, match=r"no config\.json.* holds model-q8\.gguf: give the path"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "holds list; expected an object")]
)
def test_a_broken_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_model_facts(tmp_path)
