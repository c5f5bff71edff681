"""huggingface_hub's InferenceClient, on routes of text-embeddings-inference."""

from __future__ import annotations

import numpy as np
import pytest
from huggingface_hub import InferenceClient

pytestmark = pytest.mark.ray

TEXT = "Paris is the capital of France."


def test_vectors(server_url: str) -> None:
    client = InferenceClient(f"{server_url}/embed")
    vector = client.feature_extraction(TEXT)
    longer = client.feature_extraction(TEXT, normalize=False, truncate=True)

    assert vector.shape == (1, 384)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
    assert longer.shape == (1, 384)


def test_similarities(server_url: str) -> None:
    client = InferenceClient(f"{server_url}/similarity")
    near, far = client.sentence_similarity(
        TEXT, other_sentences=["The French capital is Paris.", "Bananas are yellow."]
    )

    assert near > far
