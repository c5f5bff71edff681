"""A model of transformers that two ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import make_plan
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import open_served_model
from remora.engine.parallel.layout import Layout
from tests.engine.fallback.conftest import Checkpoints
from tests.engine.models.oracle import Oracle
from tests.engine.models.paged_model import PagedModel
from tests.engine.models.test_parity import make_prompts
from tests.engine.parallel.ranks import connected
from tests.engine.parallel.test_shares import MACHINE


def plan_of(path: Path, **sections: dict[str, object]) -> object:
    config = parse_args({"model": {"path": str(path)}, "engine": {"kv_tokens": 512}, **sections})
    return make_plan(config, read_model_facts(path, Loading.of(config.model)), MACHINE, path)


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_give_what_transformers_gives(tied: bool, checkpoints: Checkpoints) -> None:
    path = checkpoints("helium", tie_word_embeddings=tied)
    ids = make_prompts([30])[0]

    models = []
    for rank in range(2):
        opened = open_served_model(
            path,
            dtype=torch.float32,
            load_format="auto",
            device="cpu",
            show_progress=False,
            layout=Layout(rank=rank, tp_size=2),
            edit=None,
            loading=Loading(),
        )
        with opened as (model, _):
            models.append(model)

    def run(rank: int) -> torch.Tensor:
        paged = PagedModel(models[rank], group=groups[rank])
        return torch.cat([paged.step(a=ids[:20])["a"], paged.step(a=ids[20:])["a"]])

    with connected(2, 1) as (threads, groups):
        parts = threads.on_all(run)

    logits = torch.cat(parts, dim=1)
    assert (logits - Oracle(path).logits(ids)).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("family", "sections", "says"),
    [
        ("opt", {"parallel": {"tp_size": 2}}, "no plan for dividing it; set it to 1"),
        ("phimoe", {"parallel": {"tp_size": 2}}, "divides .*experts.* as .*, which is not done"),
        ("helium", {"parallel": {"pp_size": 2}}, r"set parallel\.pp_size to 1"),
        ("helium", {"model": {"quantization": "int8"}}, "set model.quantization to none"),
        ("helium", {"engine": {"cpu_kernels": "native"}}, "set engine.cpu_kernels to auto"),
        ("helium", {"lora": {"dynamic": True}}, r"set lora\.dynamic to false"),
        (
            "helium",
            {
                "debug": {"tensor_dump_dir": "/x"},
                "engine": {"device": "cpu", "cpu_kernels": "torch", "kv_tokens": 512},
            },
            "debug.tensor_dump_dir",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_before_weights_are_read(
    family: str, sections: dict[str, dict[str, object]], says: str, checkpoints: Checkpoints
) -> None:
    path = checkpoints(family)
    sections = {**sections, "model": {"path": str(path), **sections.get("model", {})}}

    with pytest.raises(ConfigError, match=says):
        plan_of(path, **sections)
