"""The task of a checkpoint, from its folder: text, embeddings or scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remora.engine.encoders.architectures import ENCODERS
from remora.engine.models.architectures import ARCHITECTURES
from remora.engine.pooling.facts import pooling_task


def folder(
    path: Path, architecture: str, *, num_labels: int = 2, is_sentences: bool = False
) -> Path:
    raw = {"architectures": [architecture], "num_labels": num_labels}
    (path / "config.json").write_text(json.dumps(raw))
    if is_sentences:
        (path / "modules.json").write_text("[]")
    return path


@pytest.mark.parametrize(
    ("architecture", "num_labels", "task"),
    [
        *((name, 2, None) for name in ARCHITECTURES),
        *((name, 2, "embed") for name in ENCODERS if "Classification" not in name),
        ("HeliumForCausalLM", 2, None),  # transformers' code runs it
        ("Qwen3Model", 2, "embed"),
        ("MistralModel", 2, "embed"),
        ("BertForSequenceClassification", 1, "rerank"),
        ("XLMRobertaForSequenceClassification", 3, "classify"),
        ("Qwen2ForSequenceClassification", 1, "reward"),
        ("LlamaForSequenceClassification", 4, "classify"),
        ("Qwen2ForRewardModel", 2, "reward"),
        ("InternLM2ForRewardModel", 2, "reward"),
        ("Qwen2ForProcessRewardModel", 2, "reward"),
    ],
)
def test_tasks_of_architectures(
    tmp_path: Path, architecture: str, num_labels: int, task: str | None
) -> None:
    assert pooling_task(folder(tmp_path, architecture, num_labels=num_labels), "auto") == task


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "BertModel", "MistralModel"])
def test_folders_of_sentence_transformers_embed(tmp_path: Path, architecture: str) -> None:
    path = folder(tmp_path, architecture, is_sentences=True)
    assert pooling_task(path, "auto") == "embed"
    assert pooling_task(path, "generate") is None
