"""Heads of reward models, against their formulas over the hidden states of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from remora.configs.loading import Loading
from remora.configs.model import ModelSection
from remora.configs.pooling import PoolingSection
from remora.engine.pooling.facts import pooling_task, read_pooling_facts
from remora.engine.pooling.load import load_pooling_model
from remora.engine.pooling.row import Row
from remora.engine.types import FloatArray
from tests.engine.models.families import as_internlm2
from tests.tiny_encoders import randomise
from tests.tiny_models import COMMON

ROWS = [[5, 6, 7, 8], [9], list(range(3, 60)), [5, 6, 7, 9]]
SIZE = int(COMMON["hidden_size"])


def save(path: Path, oracle: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, object]]:
    randomise(oracle)
    oracle.eval().save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    return tensors, json.loads((path / "config.json").read_text())


def write(path: Path, tensors: dict[str, Tensor], raw: dict[str, object]) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(raw))


def rewards(path: Path) -> FloatArray:
    task = pooling_task(path, "auto")
    assert task == "reward"
    facts = read_pooling_facts(path, task, PoolingSection(), hidden_size=SIZE)
    assert (facts.activation, facts.size) == ("none", 1)
    model = load_pooling_model(
        path,
        facts,
        dtype=torch.float32,
        device="cpu",
        load_format="auto",
        loading=Loading.of(ModelSection(path=str(path))),
    )
    return model([Row(row) for row in ROWS])


def last_states(oracle: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        found = [oracle.model(torch.tensor([row])).last_hidden_state[0, -1] for row in ROWS]
    return torch.stack(found)


def test_qwen2_rewards_have_two_layers(tmp_path: Path) -> None:
    oracle = Qwen2ForCausalLM(Qwen2Config(**{**COMMON, "tie_word_embeddings": False}))
    tensors, raw = save(tmp_path, oracle)
    draw = torch.Generator().manual_seed(0)
    first, last = (torch.randn(n, SIZE, generator=draw) * 0.2 for n in (SIZE, 1))
    shift, offset = torch.randn(SIZE, generator=draw), torch.randn(1, generator=draw)
    heads = {
        "score.0.weight": first,
        "score.0.bias": shift,
        "score.2.weight": last,
        "score.2.bias": offset,
    }
    write(tmp_path, {**tensors, **heads}, {**raw, "architectures": ["Qwen2ForRewardModel"]})

    wanted = (last_states(oracle) @ first.T + shift).clamp(min=0) @ last.T + offset
    assert np.ptp(wanted.numpy()) > 0.1
    assert rewards(tmp_path) == pytest.approx(wanted.numpy(), abs=2e-4)


def test_internlm2_rewards_are_one_product(tmp_path: Path) -> None:
    settings = {**COMMON, "attention_bias": True, "tie_word_embeddings": False}
    oracle = LlamaForCausalLM(LlamaConfig(**settings))
    tensors, raw = as_internlm2(*save(tmp_path, oracle))
    head = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0)) * 0.2
    raw = {**raw, "architectures": ["InternLM2ForRewardModel"]}
    write(tmp_path, {**tensors, "v_head.weight": head}, raw)

    wanted = last_states(oracle) @ head.T
    assert np.ptp(wanted.numpy()) > 0.1
    assert rewards(tmp_path) == pytest.approx(wanted.numpy(), abs=2e-4)
