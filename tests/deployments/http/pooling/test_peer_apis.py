"""Pooling routes of vLLM, text-embeddings-inference and Cohere: a model, requests and answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.deployments.fakes import make_client
from tests.deployments.http.conformance import ABSENT, check_shape
from tests.deployments.pooling_replica import replica
from tests.tiny_encoders import make_framing_tokenizer, make_tiny_encoder

TEXTS = ["The quick brown fox", "jumps over the lazy dog"]
LONG = "fox " * 2000
Refused = tuple[str, dict[str, Any], str]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def check_refused(client: httpx.AsyncClient, rows: Sequence[Refused]) -> None:
    """Assert that each body gets 400 with the name of a field."""
    for path, body, param in rows:
        response = await client.post(path, json=body)
        assert response.status_code == 400, (path, body, response.text)
        assert response.json()["error"]["param"] == param, (path, body, response.text)


def vectors(answer: Any) -> Any:
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


async def test_vectors_in_the_forms_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    dtypes = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    async with replica(tmp_path, monkeypatch) as (client, _):
        plain = vectors(await post(client, "/v1/embeddings", input=TEXTS))
        for name, dtype in dtypes.items():
            body = {"input": TEXTS, "encoding_format": "base64", "embed_dtype": name}
            coded = await post(client, "/v1/embeddings", **body)
            wanted = torch.from_numpy(plain).to(dtype).view(torch.uint8).numpy()
            for one, row in zip(coded["data"], wanted, strict=True):
                assert base64.b64decode(one["embedding"]) == row.tobytes(), name
        swapped = await post(
            client,
            "/v1/embeddings",
            input=TEXTS,
            encoding_format="base64",
            embed_dtype="float16",
            endianness="big",
        )
        raw = base64.b64decode(swapped["data"][1]["embedding"])
        assert np.frombuffer(raw, ">f2") == pytest.approx(plain[1], abs=1e-3)

        body = {"input": TEXTS, "encoding_format": "bytes"}
        whole = await client.post("/v1/embeddings", json=body)
        about = json.loads(whole.headers["metadata"])
        for one, row in zip(about["data"], plain, strict=True):
            part = whole.content[one["start"] : one["end"]]
            assert np.frombuffer(part, "<f4").reshape(one["shape"]) == pytest.approx(row)
        bare = await client.post("/v1/embeddings", json=body | {"encoding_format": "bytes_only"})
        assert bare.content == whole.content
        assert "metadata" not in bare.headers
        assert bare.headers["content-type"] == "application/octet-stream"

        pooled = await client.post(
            "/pooling",
            json={"input": TEXTS[0], "task": "token_embed", "encoding_format": "bytes"},
        )
        (state,) = json.loads(pooled.headers["metadata"])["data"]
        ids = make_framing_tokenizer()(TEXTS[0])["input_ids"]
        assert state["shape"] == [len(ids), 48]

        raw_vectors = vectors(await post(client, "/v1/embeddings", input=TEXTS, normalize=False))
        inactive = vectors(await post(client, "/v1/embeddings", input=TEXTS, use_activation=False))
        assert inactive == pytest.approx(raw_vectors)
        bare_ids = ids[1:-1]
        of_ids = vectors(await post(client, "/v1/embeddings", input=bare_ids))
        unframed = vectors(
            await post(client, "/v1/embeddings", input=TEXTS[0], add_special_tokens=False)
        )
        assert unframed == pytest.approx(of_ids)
        await post(client, "/v1/embeddings", input="a", cache_salt="x", embed_dtype="float32")
        await check_refused(
            client,
            (
                ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
                ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness"),
                ("/v1/embeddings", {"input": "a", "embed_dtype": "int4"}, "embed_dtype"),
                (
                    "/v1/embeddings",
                    {"input": "a", "normalize": True, "use_activation": False},
                    "use_activation",
                ),
                ("/v1/embeddings", {"input": "a", "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
                (
                    "/v1/embeddings",
                    {"input": "a", "chat_template_kwargs": {"a": 1}},
                    "chat_template_kwargs",
                ),
                ("/v1/embeddings", {"input": ["a"] * 129, "encoding_format": "bytes"}, "input"),
                ("/v1/embeddings", {"input": ["a", ""]}, "input"),
                ("/v1/embeddings", {"input": LONG}, "input"),
                ("/pooling", {"input": LONG}, "input"),
                ("/pooling", {"input": "a", "task": "token_classify"}, "task"),
                ("/pooling", {"input": "a", "dimensions": 7}, "dimensions"),
                (
                    "/v1/embeddings",
                    {
                        "messages": [
                            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
                        ]
                    },
                    "messages[0].content",
                ),
            ),
        )
        cut = await post(client, "/v1/embeddings", input=LONG, truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] > 9


async def test_scores_in_the_shapes_of_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert", classifies=True, num_labels=1)
    documents = [*TEXTS, "a fox"]
    body: dict[str, Any] = {"query": "fox", "documents": documents}
    async with replica(tmp_path, monkeypatch) as (client, _):
        ranked = await post(client, "/rerank", **body)
        raw = await post(client, "/rerank", **body, use_activation=False)
        for one, other in zip(ranked["results"], raw["results"], strict=True):
            assert one["index"] == other["index"]
            wanted = 1 / (1 + np.exp(-other["relevance_score"]))
            assert one["relevance_score"] == pytest.approx(wanted, abs=1e-5)

        tokenizer = make_framing_tokenizer()
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in documents]
        short = await post(client, "/rerank", **body, max_tokens_per_doc=2)
        words = sum(min(2, len(one)) for one in ids)
        query = len(tokenizer("fox", add_special_tokens=False)["input_ids"])
        assert short["usage"]["prompt_tokens"] == words + 3 * (query + 3)
        long_query = {"text_1": LONG, "text_2": "a fox", "max_tokens_per_query": 2}
        clipped = await post(client, "/score", **long_query)
        assert clipped["usage"]["prompt_tokens"] == 2 + len(ids[2]) + 3

        cohere = await post(client, "/v2/rerank", **body, top_n=2)
        check_shape(
            cohere,
            {
                "id": str,
                "results": [{"index": int, "relevance_score": float, "document": ABSENT}] * 2,
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            },
        )
        tei = await post(client, "/rerank", query="fox", texts=documents, return_text=True)
        assert [one["index"] for one in tei] == [one["index"] for one in ranked["results"]]
        assert [one["text"] for one in tei] == [documents[one["index"]] for one in tei]
        assert tei[0]["score"] == pytest.approx(ranked["results"][0]["relevance_score"])
        tei_raw = await post(client, "/rerank", query="fox", texts=documents, raw_scores=True)
        assert tei_raw[0]["score"] == pytest.approx(raw["results"][0]["relevance_score"])
        too_long = await client.post("/rerank", json={"query": "a", "texts": [LONG]})
        assert too_long.status_code == 422
        assert too_long.json()["error_type"] == "validation"
        assert "texts" in too_long.json()["error"]
        assert await post(client, "/rerank", query="a", texts=[LONG], truncate=True)

        of_tokens = await post(client, "/pooling", input=TEXTS[0], task="token_classify")
        scores = np.array(of_tokens["data"][0]["data"])
        assert scores.shape == (len(tokenizer(TEXTS[0])["input_ids"]), 1)
        assert ((scores > 0) & (scores < 1)).all()
        info = (await client.get("/info")).json()
        assert info["model_type"] == {
            "reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        }
        message = (await client.post("/v2/rerank", json={"query": "a"})).json()
        assert "documents" in message["message"]
        await check_refused(
            client,
            (
                ("/rerank", body | {"documents": ["a", ""]}, "documents"),
                ("/rerank", body | {"dimensions": 3}, "dimensions"),
                ("/rerank", body | {"encoding_format": "base64"}, "encoding_format"),
                ("/rerank", body | {"embed_dtype": "float16"}, "embed_dtype"),
                ("/rerank", body | {"add_special_tokens": False}, "add_special_tokens"),
                ("/rerank", body | {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
                ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
                ("/classify", {"input": "a", "dimensions": 3}, "dimensions"),
                ("/pooling", {"input": "a", "normalize": True}, "normalize"),
            ),
        )
    api = {"generate_dialect": "sglang"}
    async with replica(tmp_path, monkeypatch, api=api) as (client, _):
        native = await post(client, "/v1/rerank", **body)
    best = ranked["results"][0]
    assert native[0]["index"] == best["index"]
    assert native[0]["score"] == pytest.approx(best["relevance_score"], abs=1e-6)
    assert native[0]["document"] == documents[best["index"]]


async def test_labels_of_text_embeddings_inference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {0: "no", 1: "maybe", 2: "yes"}
    make_tiny_encoder(tmp_path, "distilbert", classifies=True, id2label=labels)
    async with replica(tmp_path, monkeypatch) as (client, _):
        (wanted,) = (await post(client, "/classify", input=TEXTS[0]))["data"]
        (raw,) = (await post(client, "/classify", input=TEXTS[0], use_activation=False))["data"]
        one = await post(client, "/predict", inputs=TEXTS[0])
        several = await post(client, "/predict", inputs=[[TEXTS[0]], [TEXTS[1]]])
        logits = await post(client, "/predict", inputs=TEXTS[0], raw_scores=True)
        pair = await client.post("/predict", json={"inputs": [TEXTS]})
    assert {entry["label"]: entry["score"] for entry in one} == pytest.approx(
        dict(zip(labels.values(), wanted["probs"], strict=True))
    )
    assert [entry["score"] for entry in one] == sorted(wanted["probs"], reverse=True)
    assert [e["score"] for e in several[0]] == pytest.approx([e["score"] for e in one], abs=1e-6)
    assert len(several) == 2
    found = np.exp(raw["probs"]) / np.exp(raw["probs"]).sum()
    assert found == pytest.approx(wanted["probs"], abs=1e-5)
    assert [e["score"] for e in logits] == pytest.approx(sorted(raw["probs"], reverse=True))
    assert pair.status_code == 422


async def test_embeddings_in_the_shapes_of_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    pooling = {"prompts": {"query": "find: ", "document": "text: "}}
    async with replica(tmp_path, monkeypatch, pooling=pooling) as (client, _):
        plain = vectors(await post(client, "/v1/embeddings", input=TEXTS))
        query = vectors(await post(client, "/v1/embeddings", input=TEXTS[:1], prompt_name="query"))
        tei = await post(client, "/embed", inputs=TEXTS)
        assert np.array(tei) == pytest.approx(plain, abs=1e-6)
        assert await post(client, "/embed", inputs=TEXTS[0], prompt_name="query") == [
            pytest.approx(query[0].tolist(), abs=1e-6)
        ]
        (states,) = await post(client, "/embed_all", inputs=TEXTS[0])
        assert len(states) == len(make_framing_tokenizer()(TEXTS[0])["input_ids"])
        near = await post(
            client, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS}
        )
        assert len(near) == 2
        info = (await client.get("/info")).json()
        assert info["model_type"] == {"embedding": {"pooling": "mean"}}
        for path, body, text in (
            ("/embed", {"inputs": LONG}, "truncate"),
            ("/embed", {"inputs": ""}, "inputs"),
            ("/embed_sparse", {"inputs": "a"}, "sparse"),
            ("/embed_all", {"inputs": "a", "normalize": True}, "normalize"),
            ("/embed", {"inputs": []}, "inputs"),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 422, (path, response.text)
            assert response.json()["error_type"] == "validation"
            assert text in response.json()["error"]
        assert len(await post(client, "/embed", inputs=LONG, truncate=True)) == 1

        cohere = await post(
            client,
            "/v2/embed",
            texts=TEXTS[:1],
            input_type="search_query",
            embedding_types=["float", "binary", "ubinary", "base64"],
        )
        found = cohere["embeddings"]
        assert found["float"][0] == pytest.approx(query[0].tolist(), abs=1e-6)
        assert np.frombuffer(base64.b64decode(found["base64"][0]), "<f4") == pytest.approx(query[0])
        bits = np.unpackbits(np.array(found["ubinary"][0], np.uint8)).astype(bool)
        assert (bits == (query[0] > 0)).all()
        assert [value + 128 for value in found["binary"][0]] == found["ubinary"][0]
        assert cohere["texts"] == TEXTS[:1]
        assert cohere["meta"]["billed_units"]["input_tokens"] > 0
        parts = {"content": [{"type": "text", "text": TEXTS[0]}]}
        of_parts = await post(client, "/v2/embed", inputs=[parts])
        assert of_parts["embeddings"]["float"][0] == pytest.approx(plain[0].tolist(), abs=1e-6)
        cut = await post(client, "/v2/embed", texts=[LONG], max_tokens=5)
        assert cut["meta"]["billed_units"]["input_tokens"] == 5
        await check_refused(
            client,
            (
                ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
                ("/v2/embed", {"texts": ["a"], "images": ["data:"]}, "images"),
                ("/v2/embed", {"texts": [LONG], "truncate": "NONE"}, "texts"),
                ("/v2/embed", {"texts": ["a"], "output_dimension": 7}, "output_dimension"),
                ("/v2/embed", {}, "texts"),
            ),
        )


async def test_routes_of_pooling_models_name_the_reason_at_a_model_that_generates() -> None:
    async with make_client() as client:
        for path, body, status in (
            ("/embed", {"inputs": "a"}, 422),
            ("/predict", {"inputs": "a"}, 422),
            ("/rerank", {"query": "a", "texts": ["b"]}, 422),
            ("/v2/embed", {"texts": ["a"]}, 400),
            ("/v2/rerank", {"query": "a", "documents": ["b"]}, 400),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == status, response.text
            assert "model.task" in response.text
