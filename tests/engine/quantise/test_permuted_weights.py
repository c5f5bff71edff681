"""The benchmark's permuted copy of a checkpoint computes the same function."""

from pathlib import Path

import torch

from tests.benchmarks.quantise.permuted_weights import write_permuted
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.models.logits import NUM_TOKENS, make_ids
from tests.engine.models.paged_model import PagedModel


def test_permuted_channels_change_no_logit(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, ids = tiny_checkpoints("llama"), make_ids(NUM_TOKENS)

    write_permuted(path, tmp_path / "out")

    before, after = (PagedModel(load(each)).step(a=ids)["a"] for each in (path, tmp_path / "out"))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-3)
    weights = [
        dict(load(each).tensors())["model.layers.0.mlp.down_proj.weight"].memory
        for each in (path, tmp_path / "out")
    ]
    assert not torch.equal(*weights)
