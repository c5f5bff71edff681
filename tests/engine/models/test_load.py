from pathlib import Path

import pytest
import torch

from remora.configs.errors import ConfigError
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.models.paged_model import PagedModel


@pytest.mark.parametrize(
    ("load_format", "message"),
    [
        ("npcache", "'npcache'; known are auto, safetensors, gguf, pt"),
        ("gguf", r"'gguf', but .* is a folder; set load_format: auto"),
    ],
)
def test_a_load_format_that_does_not_fit_is_refused(
    load_format: str, message: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny_checkpoints("llama"), load_format=load_format)


def test_dummy_weights_need_only_a_config_and_are_the_same_each_time(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    config = (tiny_checkpoints("qwen3") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)

    one, two = (load(tmp_path, torch.bfloat16, load_format="dummy") for _ in range(2))

    logits = PagedModel(one).step(a=list(range(40)))["a"]
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(logits, PagedModel(two).step(a=list(range(40)))["a"])
