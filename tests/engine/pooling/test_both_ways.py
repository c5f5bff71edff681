"""Decoders whose tokens also see those that come later: EmbeddingGemma, and is_causal: false."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModel

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import Loading
from remora.configs.sections.model import ModelSection
from remora.engine.models.architectures import parse_config, parse_states
from remora.engine.models.implementation import implementation_of
from remora.engine.pooling.embedder import Embedder
from remora.engine.pooling.facts import pooling_task
from remora.engine.pooling.row import Row
from tests.conftest import TinyCheckpoints
from tests.engine.pooling.test_encoders import assert_states, load, rows_of, states_of
from tests.tiny_embedders import PROMPTS, WINDOW, make_tiny_embedding_gemma
from tests.tiny_encoders import make_framing_tokenizer
from tests.tolerance import near

ROWS = rows_of((1, WINDOW // 2, WINDOW // 2 + 1, 90, 24, 24))
TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 4, "x " * 20]


def see_both_ways(path: Path, folder: Path) -> Path:
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    raw = json.loads((path / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**raw, "is_causal": False}))
    return folder


@pytest.mark.parametrize("family", ["gemma", "mistral", "qwen2"])
def test_states_are_those_of_transformers(
    tmp_path: Path, family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    if family == "gemma":
        make_tiny_embedding_gemma(tmp_path)
        (tmp_path / "modules.json").unlink()
    else:
        see_both_ways(tiny_checkpoints(family), tmp_path)
    # Its other kernels take a mask that is nowhere false for a causal one.
    oracle = AutoModel.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    model = load(tmp_path, task="embed")
    assert_states(model, oracle, ROWS)
    for row, mean in zip(ROWS, model(ROWS), strict=True):
        assert mean == near(states_of(oracle, row).mean(0), oracle.config.num_hidden_layers)


def test_embeddinggemma_embeds_as_its_modules_say(tmp_path: Path) -> None:
    oracle, layers = make_tiny_embedding_gemma(tmp_path)
    tokenizer = make_framing_tokenizer()
    embedder = Embedder(str(tmp_path), engine={"num_threads": 1})
    assert embedder.plan.max_model_len == 128
    found = {name: embedder.embed(TEXTS, prompt=name) for name in (None, *PROMPTS)}
    embedder.close()
    for name, vectors in found.items():
        for text, vector in zip(TEXTS, vectors, strict=True):
            ids = tokenizer(PROMPTS.get(name or "", "") + text)["input_ids"]
            state = states_of(oracle, Row(ids)).mean(0)
            wanted = normalize(layers[1] @ (layers[0] @ state), dim=0)
            assert vector == near(wanted, oracle.config.num_hidden_layers)


@pytest.mark.parametrize("key", ["use_bidirectional_attention", "is_causal"])
def test_text_is_not_made_by_what_sees_both_ways(tmp_path: Path, key: str) -> None:
    make_tiny_embedding_gemma(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | {"architectures": ["Gemma3ForCausalLM"]}
    if key == "is_causal":
        raw |= {key: False, "use_bidirectional_attention": False}
    file.write_text(json.dumps(raw))
    (tmp_path / "modules.json").unlink()

    assert pooling_task(tmp_path, "auto") is None
    with pytest.raises(ConfigError, match=f"{key} in config.json is .*model.task: embed"):
        implementation_of(tmp_path, Loading.of(ModelSection(path=str(tmp_path))))
    assert pooling_task(tmp_path, "embed") == "embed"


def test_windows_reach_as_far_as_transformers_masks(tmp_path: Path) -> None:
    make_tiny_embedding_gemma(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = ["Gemma3ForCausalLM"]

    half = WINDOW // 2 + 1
    assert parse_states(raw).windows == (half, None, half)
    plain = {**raw, "use_bidirectional_attention": None}
    assert parse_config(plain).windows == (WINDOW, None, WINDOW)


def test_distances_and_chunks_are_not_known_both_ways(tiny_checkpoints: TinyCheckpoints) -> None:
    raw = json.loads((tiny_checkpoints("llama4") / "config.json").read_text())

    with pytest.raises(ConfigError, match=r"is_causal in config\.json is false"):
        parse_states({**raw, "is_causal": False})
