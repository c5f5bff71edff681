"""Adapters of tests are the same in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from remora.lora.files import WEIGHTS
from tests.lora.adapters import make_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoints


def test_an_adapter_depends_on_nothing_but_its_seed(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Or two tokens are as good as tied in one run of some hundred."""
    base = tiny_checkpoints("llama")
    for name in ("one", "same"):
        torch.rand(1)  # of whatever ran before
        make_adapter(base, tmp_path / name, seed=3, r=2, target_modules=["q_proj"])

    one, same = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "same"))

    assert all(torch.equal(one[name], same[name]) for name in one)
