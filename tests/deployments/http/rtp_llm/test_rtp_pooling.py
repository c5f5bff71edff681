"""RTP-LLM's routes for pooling models: their answers agree with those of OpenAI's and vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.deployments.http.conformance import ABSENT, check_shape
from tests.deployments.pooling_replica import replica
from tests.tiny_encoders import make_tiny_encoder

TEXTS = ["The quick brown fox", "jumps over the lazy dog"]
LONG = "fox " * 2000


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def check_refused(client: httpx.AsyncClient, path: str, param: str, **body: Any) -> None:
    response = await client.post(path, json=body)
    error = response.json()
    assert response.status_code == 400, response.text
    assert error["error"]["param"] == param
    assert error["error_code"] in (507, 511, 515)


async def test_similarities_and_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_encoder(tmp_path, "bert")
    path, right = "/v1/embeddings/similarity", [*TEXTS, "a fox"]
    async with replica(tmp_path, monkeypatch) as (client, _):
        plain = await post(client, "/v1/embeddings", input=right, normalize=True)
        vectors = np.array([one["embedding"] for one in plain["data"]])
        answer = await post(client, path, left=TEXTS, right=right)
        assert np.array(answer["similarity"]) == pytest.approx(vectors[:2] @ vectors.T, abs=1e-5)
        check_shape(answer, {"model": str, "left_response": ABSENT})
        shown = await post(client, path, left=TEXTS, right=right, return_response=True)
        found = [one["embedding"] for one in shown["right_response"]["data"]]
        assert np.array(found) == pytest.approx(vectors, abs=1e-6)
        assert len(shown["left_response"]["data"]) == 2
        dense = await post(client, "/v1/embeddings/dense", input=right, normalize=True)
        assert dense["data"][2]["embedding"] == pytest.approx(vectors[2].tolist(), abs=1e-6)
        await check_refused(client, path, "left", left=[LONG], right=["a"])
        await check_refused(client, path, "right", left=["a"], right=["a", ""])
        await check_refused(client, path, "right", left=["a"])
        await check_refused(client, path, "left", left="a", right=["a"])
        await check_refused(client, "/v1/embeddings/sparse", "input", input="a")
        await check_refused(client, "/v1/embeddings/colbert", "input", input="a")
        generated = await client.post("/", json={"prompt": "a"})
        assert generated.json()["error"]["code"] == "not_offered"


async def test_scores_of_documents_and_logits_of_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert", classifies=True, num_labels=1)
    path, body = "/v1/reranker", {"query": "fox", "documents": [*TEXTS, "a fox"]}
    async with replica(tmp_path, monkeypatch) as (client, _):
        raw = (await post(client, "/rerank", **body, use_activation=False))["results"]
        ranked = await post(client, path, **body)
        assert [one["index"] for one in ranked["results"]] == [one["index"] for one in raw]
        scores = [one["relevance_score"] for one in ranked["results"]]
        assert scores == pytest.approx([one["relevance_score"] for one in raw], abs=1e-6)
        assert ranked["results"][0]["document"] == body["documents"][raw[0]["index"]]
        assert ranked["total_tokens"] > 0
        best = await post(client, path, **body, top_k=1, normalize=True, return_documents=False)
        (only,) = best["results"]
        assert "document" not in only
        assert only["relevance_score"] == pytest.approx(1 / (1 + np.exp(-scores[0])), abs=1e-5)
        in_order = await post(client, path, **body, sorted=False, top_k=2)
        assert [one["index"] for one in in_order["results"]] == [0, 1]
        assert len((await post(client, path, query="a", documents=[LONG]))["results"]) == 1
        await check_refused(
            client, path, "documents", query="a", documents=[LONG], truncation=False
        )
        await check_refused(client, path, "top_k", **body, top_k=0)
        await check_refused(client, path, "query", **(body | {"query": ""}))

        labels = await post(client, "/v1/classifier", input=TEXTS)
        wanted = await post(client, "/classify", input=TEXTS, use_activation=False)
        assert labels["object"] == "list"
        assert np.array(labels["score"]) == pytest.approx(
            np.array([one["probs"] for one in wanted["data"]]), abs=1e-6
        )
        await check_refused(client, "/v1/classifier", "input", input=[TEXTS])
        await check_refused(client, "/v1/classifier", "input", input="a")
        await check_refused(client, "/v1/classifier", "input", input=["a", ""])
