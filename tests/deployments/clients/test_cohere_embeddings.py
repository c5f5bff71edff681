"""Cohere's client, on /v2/embed and /v2/rerank."""

from __future__ import annotations

import cohere
import pytest

pytestmark = pytest.mark.ray

TEXTS = ["Paris is the capital of France.", "Bananas are yellow."]


@pytest.fixture(scope="module")
def client(server_url: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="any", base_url=server_url)


def test_embeddings_of_several_types(client: cohere.ClientV2, model: str) -> None:
    answer = client.embed(
        model=model,
        texts=TEXTS,
        input_type="search_document",
        embedding_types=["float", "ubinary"],
    )

    floats, bits = answer.embeddings.float_, answer.embeddings.ubinary
    assert [len(vector) for vector in floats] == [384, 384]
    assert [len(vector) for vector in bits] == [48, 48]
    assert answer.meta.billed_units.input_tokens > 0


def test_documents_are_ranked(client: cohere.ClientV2, model: str) -> None:
    answer = client.rerank(model=model, query="yellow fruit", documents=TEXTS, top_n=1)

    (best,) = answer.results
    assert best.index == 1
    assert best.relevance_score > 0


def test_types_that_are_not_served(client: cohere.ClientV2, model: str) -> None:
    with pytest.raises(cohere.BadRequestError) as refused:
        client.embed(model=model, texts=TEXTS, input_type="search_query", embedding_types=["int8"])

    assert "embedding_types" in str(refused.value)
