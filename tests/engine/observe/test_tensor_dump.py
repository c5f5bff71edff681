"""What each layer gives, in files: the same as another implementation's layers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.engine.launch import build_engine
from remora.engine.types import Request, SamplingParams
from tests.conftest import TinyCheckpoints

IDS = [5, 9, 17, 3, 44]


def make_args(path: object, folder: Path, **debug: Any) -> dict[str, Any]:
    engine = {"device": "cpu", "cpu_kernels": "torch", "kv_tokens": 512, "num_threads": 1}
    model = {"path": str(path), "dtype": "float32"}
    return {
        "model": model,
        "engine": engine,
        "debug": {"tensor_dump_dir": str(folder), **debug},
    }


@pytest.mark.observes("debug.tensor_dump_dir", "debug.tensor_dump_passes")
def test_layers_give_what_transformers_layers_give(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoints("llama")
    args = make_args(path, tmp_path / "dump", tensor_dump_passes=3)
    engine = build_engine(parse_args(args), show_progress=False).engine
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id="a", prompt_ids=IDS, sampling=sampling))
    given: list[int] = []
    while engine.has_work:
        given += [token for output in engine.step() for token in output.token_ids]
    engine.close()

    first, *later = (load_file(file) for file in sorted((tmp_path / "dump").iterdir()))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    layers = [first[f"layer.{layer}"] for layer in range(model.config.num_hidden_layers)]
    for ours, theirs in zip(layers[:-1], hidden[1:-1], strict=True):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)
    assert first["token_ids"].tolist() == IDS
    assert [dump["token_ids"].tolist() for dump in later] == [[token] for token in given[:2]]
    assert [dump["positions"].tolist() for dump in later] == [[5], [6]]


@pytest.mark.parametrize(
    "changes",
    [{"engine": {"device": "cpu"}}, {"parallel": {"tp_size": 2}}, {"engine": {"device": "cuda"}}],
)
def test_where_there_are_no_layers_to_listen_at_it_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="tensor_dump_dir needs"):
        parse_args({**make_args("x", tmp_path), **changes})
