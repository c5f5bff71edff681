"""/v1/embeddings of a real model equal transformers', for texts of all lengths in one request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from remora.engine.weights.resolve_model import MINILM, resolve_model
from tests.deployments.pooling_replica import replica
from tests.engine.pooling.test_minilm import make_texts, needs_minilm, oracle


@needs_minilm
async def test_texts_are_embedded_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_texts(60, 400)
    assert max(len(text.split()) for text in given) > 256  # the longest are truncated
    async with replica(MINILM, monkeypatch) as (client, _):
        body = {"input": given, "truncate_prompt_tokens": -1}
        response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    found = np.array([entry["embedding"] for entry in response.json()["data"]])
    assert found.shape == (60, 384)
    assert np.abs(found - oracle(resolve_model(MINILM, tmp_path), given)).max() < 1e-5
