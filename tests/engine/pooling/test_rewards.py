"""Heads of reward models, against their formulas over the hidden states of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from remora.configs.sections.pooling import PoolingSection
from remora.engine.pooling.facts import pooling_task, read_pooling_facts
from remora.engine.pooling.row import Row
from remora.engine.pooling.vectors import scores_of
from remora.engine.types import FloatArray
from tests.engine.models.families import as_internlm2
from tests.engine.pooling.test_encoders import load, states_of
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
    facts = read_pooling_facts(path, "reward", PoolingSection(), hidden_size=SIZE)
    assert (facts.activation, facts.size) == ("none", 1)
    found = load(path, size=SIZE)([Row(row) for row in ROWS])
    assert isinstance(found, np.ndarray)
    return found


def two_layers(outputs: int) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]:
    """Return the tensors of a random head with a hidden layer, and its formula."""
    draw = torch.Generator().manual_seed(0)
    first, last = (torch.randn(n, SIZE, generator=draw) * 0.2 for n in (SIZE, outputs))
    shift, offset = torch.randn(SIZE, generator=draw), torch.randn(outputs, generator=draw)
    tensors = {
        "score.0.weight": first,
        "score.0.bias": shift,
        "score.2.weight": last,
        "score.2.bias": offset,
    }
    return tensors, lambda states: (states @ first.T + shift).clamp(min=0) @ last.T + offset


def make_qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**COMMON, "tie_word_embeddings": False}))


def last_states(oracle: PreTrainedModel) -> Tensor:
    return torch.stack([states_of(oracle.model, Row(row))[-1] for row in ROWS])


def assert_rewards(path: Path, wanted: Tensor) -> None:
    assert np.ptp(wanted.numpy()) > 0.1
    assert rewards(path) == near(wanted, NUM_LAYERS)


def test_qwen2_rewards_have_two_layers(tmp_path: Path) -> None:
    oracle = make_qwen2()
    tensors, raw = save(tmp_path, oracle)
    heads, judge = two_layers(1)
    write(tmp_path, {**tensors, **heads}, {**raw, "architectures": ["Qwen2ForRewardModel"]})

    assert_rewards(tmp_path, judge(last_states(oracle)))


def save_process_rewards(path: Path) -> Callable[[list[int], int], Tensor]:
    """Write a process reward model; returns what gives its rewards at a token's places."""
    oracle = make_qwen2()
    tensors, raw = save(path, oracle)
    heads, judge = two_layers(2)
    said = {"architectures": ["Qwen2ForProcessRewardModel"], "id2label": {"0": "not so"}}
    write(path, {**tensors, **heads}, {**raw, **said})

    def wanted(ids: list[int], step: int) -> Tensor:
        states = states_of(oracle.model, Row(ids))
        return judge(states[torch.tensor(ids) == step]).softmax(1)

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

    found = load(tmp_path, size=SIZE, step_id=step)([Row(row) for row in rows])

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

    assert_rewards(tmp_path, last_states(oracle) @ head.T)
