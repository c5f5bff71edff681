"""Hidden states and scores of encoders equal those of transformers, alone and in batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.configs.sections.model import ModelSection
from remora.configs.sections.pooling import PoolingSection, Task
from remora.engine.encoders.architectures import FAMILIES, parse_encoder
from remora.engine.pooling.facts import pooling_task, read_pooling_facts
from remora.engine.pooling.load import load_pooling_model
from remora.engine.pooling.model import PoolingModel
from remora.engine.pooling.row import Row
from remora.engine.pooling.scoring import HEADS
from tests.conftest import TinyCheckpoints
from tests.tiny_encoders import CLASSIFIERS, COMMON, ENCODERS, HAS_GTE, make_tiny_encoder
from tests.tiny_models import VOCAB_SIZE
from tests.tolerance import near

LENGTHS = (3, 20, 20, 1, 300, 57)
HIDDEN_SIZE = int(COMMON["hidden_size"])
NUM_LAYERS = int(COMMON["num_hidden_layers"])


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    generator = np.random.default_rng(0)
    return [Row(generator.integers(3, VOCAB_SIZE, length).tolist()) for length in lengths]


def load(
    path: Path,
    section: PoolingSection | None = None,
    task: Task | None = None,
    *,
    size: int = HIDDEN_SIZE,
    step_id: int | None = None,
) -> PoolingModel:
    task = task or pooling_task(path, "auto")
    assert task is not None
    facts = read_pooling_facts(path, task, section or PoolingSection(), hidden_size=size)
    return load_pooling_model(
        path,
        replace(facts, step_id=step_id),
        dtype=torch.float32,
        device="cpu",
        load_format="auto",
        loading=Loading.of(ModelSection(path=str(path))),
    )


@torch.inference_mode()
def states_of(oracle: Any, row: Row, **inputs: Any) -> torch.Tensor:
    """Return the hidden states [num_tokens, hidden_size] that transformers computes."""
    states: torch.Tensor = oracle(torch.tensor([row.token_ids]), **inputs).last_hidden_state[0]
    return states


def assert_states(model: PoolingModel, oracle: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        assert model.hidden(row) == near(states_of(oracle, row), oracle.config.num_hidden_layers)


@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_are_those_of_transformers_and_of_a_row_alone(
    tmp_path: Path, family: str
) -> None:
    oracle = make_tiny_encoder(tmp_path, family)
    model, rows = load(tmp_path), rows_of()

    assert_states(model, oracle, rows)
    for row, vector in zip(rows, model(rows), strict=True):
        assert vector == near(model([row])[0], NUM_LAYERS)


@pytest.mark.parametrize("family", ["mistral", "llama4"])
def test_hidden_states_of_decoders_with_windows_and_chunks_are_those_of_transformers(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).model

    assert_states(load(path, task="embed"), oracle, rows_of((1, 24, 90)))


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int) -> None:
    oracle = make_tiny_encoder(tmp_path, family, classifies=True, num_labels=num_labels)
    assert pooling_task(tmp_path, "auto") == ("rerank" if num_labels == 1 else "classify")
    rows = rows_of()
    with torch.inference_mode():
        wanted = torch.cat([oracle(torch.tensor([row.token_ids])).logits for row in rows])
    assert load(tmp_path)(rows) == near(wanted, NUM_LAYERS)


def test_norms_may_have_the_names_of_early_checkpoints(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "bert")
    rows = rows_of((5, 9))
    wanted = load(tmp_path)(rows)

    file = tmp_path / "model.safetensors"
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(old, file)

    assert any(name.endswith(".gamma") for name in old)
    assert load(tmp_path)(rows) == near(wanted, NUM_LAYERS)


@pytest.mark.skipif(not HAS_GTE, reason="this version of transformers has no GTE")
def test_gte_with_the_keys_of_its_first_version(tmp_path: Path) -> None:
    theta, factor, dim = 20_000.0, 8.0, 12
    slower = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / dim)}
    oracle = make_tiny_encoder(tmp_path, "gte", rope_parameters=slower, type_vocab_size=1)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | {
        "architectures": ["NewModel"],
        "model_type": "new",
        "rope_theta": theta,
        "rope_scaling": {"factor": factor, "type": "ntk"},
    }
    del raw["rope_parameters"]
    file.write_text(json.dumps(raw))
    assert_states(load(tmp_path), oracle, rows_of((1, 300)))
    for key, value in (("logn_attention_scale", True), ("pack_qkv", False)):
        with pytest.raises(ConfigError, match=key):
            parse_encoder({**raw, key: value})
    with pytest.raises(ConfigError, match="mixed_b"):
        parse_encoder({**raw, "rope_scaling": {"factor": 8.0, "type": "ntk", "mixed_b": 0.5}})


def test_every_family_of_encoders_has_a_head_for_scores() -> None:
    assert HEADS.keys() == FAMILIES.keys()


def test_the_second_text_of_a_pair_has_its_own_type(tmp_path: Path) -> None:
    oracle = make_tiny_encoder(tmp_path, "bert")
    (row,) = rows_of((9,))
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    wanted = states_of(oracle, row, token_type_ids=types)
    found = load(tmp_path).hidden(Row(row.token_ids, second=4))
    assert found == near(wanted, NUM_LAYERS)


@pytest.mark.parametrize("method", ["cls", "last", "mean", "weighted_mean", "max"])
def test_pooling(tmp_path: Path, method: str) -> None:
    oracle = make_tiny_encoder(tmp_path, "bert")
    rows = rows_of((5, 9, 9))
    section = PoolingSection.model_validate({"method": method})
    for row, found in zip(rows, load(tmp_path, section)(rows), strict=True):
        states = states_of(oracle, row)
        weights = torch.arange(1.0, len(states) + 1)
        wanted = {
            "cls": states[0],
            "last": states[-1],
            "mean": states.mean(0),
            "max": states.max(0).values,
            "weighted_mean": (weights[:, None] * states).sum(0) / weights.sum(),
        }[method]
        assert found == near(wanted, NUM_LAYERS)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("bert", "hidden_act", "swish9"),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "num_attention_heads", 7),
        ("mpnet", "relative_attention_num_buckets", 64),
        ("albert", "num_hidden_groups", 2),
        ("albert", "inner_group_num", 2),
        ("deberta", "pooler_hidden_size", 24),
        ("deberta", "relative_attention", False),
        ("deberta", "share_att_key", False),
        ("deberta", "pos_att_type", ["c2p"]),
        ("deberta", "conv_kernel_size", 3),
        ("deberta", "embedding_size", 24),
        ("deberta", "attention_head_size", 6),
        ("nomic", "rotary_scaling_factor", 2.0),
        ("nomic", "moe_every_n_layers", 2),
    ],
)
def test_unsupported_settings_are_refused_at_loading(
    tmp_path: Path, family: str, key: str, value: object
) -> None:
    make_tiny_encoder(tmp_path, family, classifies=key == "pooler_hidden_size")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    with pytest.raises(ConfigError, match=key.removeprefix("is_")):
        load(tmp_path)


@pytest.mark.parametrize(
    ("classifies", "task", "message"),
    [(False, "classify", "model.task"), (True, "embed", "model.task")],
)
def test_a_task_that_a_checkpoint_cannot_do_is_refused(
    tmp_path: Path, classifies: bool, task: str, message: str
) -> None:
    make_tiny_encoder(tmp_path, "bert", classifies=classifies)
    with pytest.raises(ConfigError, match=message):
        pooling_task(tmp_path, task)
