"""The ollama client, on /api/embed and /api/embeddings."""

from __future__ import annotations

import ollama
import pytest

pytestmark = pytest.mark.ray

TEXTS = ["Paris is the capital of France.", "Bananas are yellow."]


def test_vectors(server_url: str, model: str) -> None:
    client = ollama.Client(host=server_url)
    several = client.embed(model=model, input=TEXTS)
    one = client.embeddings(model=model, prompt=TEXTS[0])

    assert [len(vector) for vector in several.embeddings] == [384, 384]
    assert list(one.embedding) == pytest.approx(list(several.embeddings[0]), abs=1e-4)
    assert (several.prompt_eval_count or 0) > 0


def test_texts_that_are_too_long(server_url: str, model: str) -> None:
    client = ollama.Client(host=server_url)
    text = "word " * 5000
    cut = client.embed(model=model, input=text)
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed(model=model, input=text, truncate=False)

    assert len(cut.embeddings) == 1
    assert refused.value.status_code == 400
