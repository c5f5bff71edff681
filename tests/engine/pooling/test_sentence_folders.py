"""Folders written by sentence-transformers: supported and refused settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.sections.pooling import PoolingSection
from remora.engine.pooling.facts import PoolingFacts, pooling_task, read_pooling_facts
from tests.tiny_embedders import make_tiny_embedding_gemma
from tests.tiny_encoders import make_tiny_encoder


def change(file: Path, **settings: Any) -> None:
    raw = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**raw, **settings}))


def facts_of(path: Path, size: int = 48) -> PoolingFacts:
    task = pooling_task(path, "auto")
    assert task is not None
    return read_pooling_facts(path, task, PoolingSection(), hidden_size=size)


def test_the_activation_of_a_cross_encoder(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path, "deberta", classifies=True, num_labels=1)
    (tmp_path / "modules.json").write_text("[]")
    assert facts_of(tmp_path).activation == "sigmoid"

    file = tmp_path / "config_sentence_transformers.json"
    act = "torch.nn.modules.linear.Identity"
    change(file, model_type="CrossEncoder", activation_fn=act, default_prompt_name=None)
    facts = facts_of(tmp_path)
    assert (facts.task, facts.activation, facts.size) == ("rerank", "none", 1)

    change(file, default_prompt_name="query")
    with pytest.raises(ConfigError, match="'query'"):
        facts_of(tmp_path)


@pytest.mark.parametrize("kind", ["CrossEncoder", "SparseEncoder", "MultiVectorEncoder"])
def test_other_kinds_than_one_vector_per_text_are_refused(tmp_path: Path, kind: str) -> None:
    make_tiny_embedding_gemma(tmp_path)
    assert pooling_task(tmp_path, "auto") == "embed"
    change(tmp_path / "config_sentence_transformers.json", model_type=kind)

    with pytest.raises(ConfigError, match=f"model_type '{kind}'"):
        pooling_task(tmp_path, "auto")


@pytest.mark.parametrize("classifies", [False, True])
def test_chat_templates_of_texts_are_refused(tmp_path: Path, classifies: bool) -> None:
    make_tiny_encoder(tmp_path, "bert", classifies=classifies)
    (tmp_path / "modules.json").write_text("[]")
    text = {"method": "forward", "method_output_name": "logits"}
    file = tmp_path / "sentence_bert_config.json"
    change(file, modality_config={"text": text}, max_seq_length=30)
    facts_of(tmp_path)
    change(file, modality_config={"text": text, "message": {**text, "format": "flat"}})

    with pytest.raises(ConfigError, match="modality_config"):
        facts_of(tmp_path)


@pytest.mark.parametrize("key", ["module_input_name", "module_output_name"])
def test_layers_per_token_are_refused(tmp_path: Path, key: str) -> None:
    model, _ = make_tiny_embedding_gemma(tmp_path)
    size = model.config.hidden_size
    file = tmp_path / "2_Dense" / "config.json"
    change(file, **{key: "sentence_embedding"})
    assert facts_of(tmp_path, size).size == 24
    change(file, **{key: "token_embeddings"})

    with pytest.raises(ConfigError, match=f"{key} 'token_embeddings'"):
        facts_of(tmp_path, size)
