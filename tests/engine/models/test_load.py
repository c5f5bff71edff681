from pathlib import Path

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.engine.models.load import load_model
from tests.conftest import TinyCheckpoints
from tests.engine.models.paged_model import PagedModel


def test_an_unknown_load_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'npcache'; known are auto, safetensors, gguf, pt"):
        load_model(
            tmp_path, dtype=torch.float32, load_format="npcache", device="cpu", show_progress=False
        )


def test_a_load_format_that_contradicts_the_path_is_refused(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints("llama")

    with pytest.raises(ConfigError, match=r"'gguf', but .* is a folder; set load_format: auto"):
        load_model(path, dtype=torch.float32, load_format="gguf", device="cpu", show_progress=False)


def test_dummy_weights_need_only_a_config_and_are_the_same_each_time(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    config = (tiny_checkpoints("qwen3") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)

    one, two = (
        load_model(
            tmp_path, dtype=torch.bfloat16, load_format="dummy", device="cpu", show_progress=False
        )
        for _ in range(2)
    )

    logits = PagedModel(one).step(a=list(range(40)))["a"]
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(logits, PagedModel(two).step(a=list(range(40)))["a"])
