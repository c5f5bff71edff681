"""Heads of reward models, against their formulas over the hidden states of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
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

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.configs.sections.model import ModelSection
from remora.configs.sections.pooling import PoolingSection
from remora.engine.pooling.facts import pooling_task, read_pooling_facts
from remora.engine.pooling.load import load_pooling_model
from remora.engine.pooling.row import Row
from remora.engine.pooling.vectors import scores_of
from remora.engine.types import FloatArray
from tests.engine.models.families import as_internlm2
from tests.tiny_encoders import randomise
from tests.tiny_models import COMMON
from tests.tolerance import near

ROWS = [[5, 6, 7, 8], [9], list(range(3, 60)), [5, 6, 7, 9]]
SIZE = int(COMMON["hidden_size"])
NUM_LAYERS = int(COMMON["num_hidden_layers"])


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
    found = model([Row(row) for row in ROWS])
    assert isinstance(found, np.ndarray)
    return found


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
    assert rewards(tmp_path) == near(wanted, NUM_LAYERS)


def save_process_rewards(path: Path) -> Callable[[list[int], int], Tensor]:
    """Write a process reward model; returns what gives its rewards at a token's places."""
    oracle = Qwen2ForCausalLM(Qwen2Config(**{**COMMON, "tie_word_embeddings": False}))
    tensors, raw = save(path, oracle)
    draw = torch.Generator().manual_seed(0)
    first, last = (torch.randn(n, SIZE, generator=draw) * 0.2 for n in (SIZE, 2))
    shift, offset = torch.randn(SIZE, generator=draw), torch.randn(2, generator=draw)
    heads = {
        "score.0.weight": first,
        "score.0.bias": shift,
        "score.2.weight": last,
        "score.2.bias": offset,
    }
    said = {"architectures": ["Qwen2ForProcessRewardModel"], "id2label": {"0": "not so"}}
    write(path, {**tensors, **heads}, {**raw, **said})

    def wanted(ids: list[int], step: int) -> Tensor:
        with torch.inference_mode():
            states = oracle.model(torch.tensor([ids])).last_hidden_state[0]
        judged = states[torch.tensor(ids) == step]
        rewards: Tensor = ((judged @ first.T + shift).clamp(min=0) @ last.T + offset).softmax(1)
        return rewards

    return wanted


def test_process_rewards_are_those_of_every_step(tmp_path: Path) -> None:
    wanted = save_process_rewards(tmp_path)
    step = 7
    rows = [*ROWS, [7, 7], [9, 7] * 40]
    task = pooling_task(tmp_path, "auto")
    assert task == "reward"
    facts = read_pooling_facts(tmp_path, task, PoolingSection(), hidden_size=SIZE)
    assert (facts.step_token, facts.activation, facts.size) == ("<extra_0>", "softmax", 2)
    assert facts.labels == ("wrong", "right")
    model = load_pooling_model(
        tmp_path,
        replace(facts, step_id=step),
        dtype=torch.float32,
        device="cpu",
        load_format="auto",
        loading=Loading.of(ModelSection(path=str(tmp_path))),
    )

    found = model([Row(row) for row in rows])

    assert [len(one) for one in found] == [row.count(step) for row in rows]
    for row, one in zip(rows, found, strict=True):
        scores = scores_of(one, facts.activation) if len(one) else one
        assert scores == near(wanted(row, step), NUM_LAYERS)


@pytest.mark.parametrize(
    ("architecture", "section", "message"),
    [
        ("Qwen2ForProcessRewardModel", {"method": "mean"}, "pooling.method"),
        ("Qwen2ForRewardModel", {"step_token": "x"}, "pooling.step_token"),
    ],
)
def test_what_has_no_meaning_for_steps_is_refused(
    tmp_path: Path, architecture: str, section: dict[str, str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    given = PoolingSection.model_validate(section)

    with pytest.raises(ConfigError, match=message):
        read_pooling_facts(tmp_path, "reward", given, hidden_size=SIZE)


def test_internlm2_rewards_are_one_product(tmp_path: Path) -> None:
    settings = {**COMMON, "attention_bias": True, "tie_word_embeddings": False}
    oracle = LlamaForCausalLM(LlamaConfig(**settings))
    tensors, raw = as_internlm2(*save(tmp_path, oracle))
    head = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0)) * 0.2
    raw = {**raw, "architectures": ["InternLM2ForRewardModel"]}
    write(tmp_path, {**tensors, "v_head.weight": head}, raw)

    wanted = last_states(oracle) @ head.T
    assert np.ptp(wanted.numpy()) > 0.1
    assert rewards(tmp_path) == near(wanted, NUM_LAYERS)
