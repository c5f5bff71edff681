"""/v1/embeddings with a tiny real encoder."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.deployments.fakes import make_client
from tests.deployments.pooling_replica import replica
from tests.tiny_embedders import DENSE, PROMPTS, make_tiny_embedding_gemma
from tests.tiny_encoders import make_framing_tokenizer, make_tiny_encoder

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 30]


async def embed(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(answer: Any) -> Any:
    return np.array([entry["embedding"] for entry in answer["data"]], dtype=np.float32)


async def fault_of(client: httpx.AsyncClient, path: str = "/v1/embeddings", **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_vectors_are_means_of_hidden_states_of_length_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_tiny_encoder(tmp_path, "bert")
    tokenizer = make_framing_tokenizer()
    async with replica(tmp_path, monkeypatch) as (client, _):
        answer = await embed(client, input=TEXTS)
    num_tokens = 0
    for text, vector in zip(TEXTS, vectors(answer), strict=True):
        ids = tokenizer(text)["input_ids"]
        num_tokens += len(ids)
        with torch.inference_mode():
            mean = oracle(torch.tensor([ids])).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(mean, dim=0).numpy()
        assert vector == pytest.approx(wanted, abs=1e-5)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_forms_of_input_and_of_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    ids = make_framing_tokenizer()(TEXTS[0])["input_ids"]
    async with replica(tmp_path, monkeypatch) as (client, server):
        plain = vectors(await embed(client, input=TEXTS[0]))
        of_ids = vectors(await embed(client, input=ids))
        of_lists = vectors(await embed(client, input=[ids, [5]]))
        raw = vectors(await embed(client, input=TEXTS[0], normalize=False))
        coded = (await embed(client, input=TEXTS[0], encoding_format="base64"))["data"][0]
        by_handle = vectors(await server.embed({"input": TEXTS[0]}))
        info = (await client.get("/model_info")).json()
        assert (await client.get("/health_generate")).status_code == 200
    assert plain == pytest.approx(of_ids)
    assert plain[0] == pytest.approx(of_lists[0], abs=1e-6)
    assert raw / np.linalg.norm(raw) == pytest.approx(plain, abs=1e-6)
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4") == pytest.approx(plain[0])
    assert by_handle == pytest.approx(plain)
    assert not info["is_generation"]


@pytest.mark.observes("limits.max_inputs")
async def test_bad_bodies_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    limits = {"max_inputs": 3}
    async with replica(tmp_path, monkeypatch, limits=limits) as (client, _):
        for body, param in (
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": [1, "a"]}, "input"),
            ({"input": [[1], "a"]}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": [100_000]}, "input"),
            ({"input": ["a"] * 4}, "input"),
            ({"input": "a " * 5000}, "input"),
            ({"input": "a", "dimensions": 7}, "dimensions"),
            ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
            ({"input": "a", "prompt_name": "query"}, "prompt_name"),
            ({"input": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens"),
        ):
            assert (await fault_of(client, **body))["param"] == param, body
        unknown = await client.post("/v1/embeddings", json={"input": "a", "model": "other"})
        assert unknown.status_code == 404


async def test_what_is_not_for_this_kind_of_model_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    message = [{"role": "user", "content": "hi"}]
    async with replica(tmp_path, monkeypatch) as (client, _):
        for path, body in (
            ("/v1/chat/completions", {"messages": message}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/generate", {"text": "hi"}),
            ("/v1/messages", {"messages": message, "max_tokens": 3, "model": "x"}),
            ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
            ("/classify", {"input": "hi"}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400, (path, response.text)
            assert "embed" in response.text or "pairs" in response.text, (path, response.text)
    async with make_client() as client:
        others: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/embeddings", {"input": "hi"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/classify", {"input": "hi"}),
            ("/encode", {"text": "hi"}),
        )
        for path, fields in others:
            assert "model.task" in (await fault_of(client, path, **fields))["message"]


@pytest.mark.observes("api.prompt_truncation", "model.context_length")
async def test_long_texts_are_cut_within_their_frame_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    tokenizer = make_framing_tokenizer()
    text = "fox " * 2000
    cut = tokenizer(text, truncation=True, max_length=9)["input_ids"]
    sections: dict[str, Any] = {"model": {"context_length": 9}}
    async with replica(tmp_path, monkeypatch, **sections) as (client, _):
        wanted = vectors(await embed(client, input=cut))
        found = vectors(await embed(client, input=text, truncate_prompt_tokens=-1))
        refused = await fault_of(client, input=text)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert refused["code"] == "context_length_exceeded"
    sections["api"] = {"prompt_truncation": "tail"}
    async with replica(tmp_path, monkeypatch, **sections) as (client, _):
        assert vectors(await embed(client, input=text)) == pytest.approx(wanted, abs=1e-6)


async def test_rows_have_no_more_tokens_than_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    async with replica(tmp_path, monkeypatch) as (client, _):
        for max_tokens in (1, 2):  # the special tokens alone are two
            fault = await fault_of(client, input="fox fox", truncate_prompt_tokens=max_tokens)
            assert "still has 3 tokens" in fault["message"]
            assert fault["param"] == "input"
        answer = await embed(client, input="fox fox", truncate_prompt_tokens=3)
    assert answer["usage"]["prompt_tokens"] == 3


async def test_a_request_says_which_side_goes_where_all_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    sections: dict[str, Any] = {
        "model": {"context_length": 9},
        "api": {"prompt_truncation": "tail"},
    }
    ids = list(range(10, 30))
    async with replica(tmp_path, monkeypatch, **sections) as (client, _):
        usual = vectors(await embed(client, input=ids))
        left = vectors(await embed(client, input=ids, truncation_side="left"))
        wanted = vectors(await embed(client, input=[ids[:9], ids[-9:]]))
    assert np.concatenate([usual, left]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.observes("model.served_name")
async def test_clients_of_ollama_get_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_encoder(tmp_path, "bert")
    sections: dict[str, Any] = {"model": {"served_name": "tiny", "context_length": 9}}
    long = "fox " * 2000
    async with replica(tmp_path, monkeypatch, **sections) as (client, _):
        plain = vectors(await embed(client, input=["a fox", long], truncate_prompt_tokens=-1))

        async def ask(path: str, **body: Any) -> Any:
            return (await client.post(path, json={"model": "tiny:latest", **body})).json()

        both = await ask("/api/embed", input=["a fox", long])
        one = await ask("/api/embed", input="a fox")
        old = await ask("/api/embeddings", prompt="a fox")
        refused = await ask("/api/embed", input=long, truncate=False)
        short = {"num_ctx": 5}
        cut = await ask("/api/embed", input="fox " * 4, options=short)
        whole = await ask("/api/embed", input="fox " * 4, options=short, truncate=False)
        missing = await ask("/api/embeddings")
        shown = await ask("/api/show")
        empty = await ask("/api/embed", input=""), await ask("/api/embed", input=[])
        old_empty = await ask("/api/embeddings", prompt="")
    assert np.array(both["embeddings"]) == pytest.approx(plain, abs=1e-6)
    assert (both["model"], len(one["embeddings"])) == ("tiny:latest", 1)
    assert both["prompt_eval_count"] > one["prompt_eval_count"] > 2
    assert old["embedding"] == pytest.approx(plain[0], abs=1e-6)
    assert "maximum context length is 9" in refused["error"]
    assert cut["prompt_eval_count"] == 5
    assert "context length is 5" in whole["error"]
    assert cut["load_duration"] > 0
    assert missing == {"error": "prompt is required."}
    assert shown["capabilities"] == ["embedding"]
    assert empty == ({"model": "tiny:latest", "embeddings": []},) * 2
    assert old_empty == {"embedding": []}


def make_sentence_folder(folder: Path) -> None:
    """Write files as sentence-transformers does: two kinds of pooling, a dense layer, prompts."""
    from safetensors.torch import save_file

    make_tiny_encoder(folder, "bert")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [
        {"path": f"{index}_{kind}" if index else "", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, settings in (
        ("1_Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}),
        ("2_Dense", {"in_features": 96, "out_features": 20, "bias": True}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(0)
    dense = {
        "linear.weight": torch.randn(20, 96, generator=generator),
        "linear.bias": torch.randn(20, generator=generator),
    }
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    said = {"prompts": {"query": "fox: ", "none": ""}, "default_prompt_name": "none"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))


@pytest.mark.observes("pooling.prompts", "pooling.default_prompt", "pooling.dimensions")
async def test_folders_of_sentence_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sentence_folder(tmp_path)
    async with replica(tmp_path, monkeypatch) as (client, server):
        assert server._served.plan.max_model_len == 40
        plain = vectors(await embed(client, input="dog"))
        query = vectors(await embed(client, input="dog", prompt_name="query"))
        assert query == pytest.approx(vectors(await embed(client, input="fox: dog")))
        assert (await fault_of(client, input="dog", dimensions=8))["param"] == "dimensions"
    assert plain.shape == (1, 20)
    assert np.linalg.norm(plain) == pytest.approx(1, abs=1e-5)
    assert np.abs(plain - query).max() > 0.01
    pooling = {
        "prompts": {"mine": "fox: "},
        "default_prompt": "mine",
        "dimensions": [8],
    }
    async with replica(tmp_path, monkeypatch, pooling=pooling) as (client, _):
        assert vectors(await embed(client, input="dog")) == pytest.approx(query)
        short = vectors(await embed(client, input="dog", dimensions=8))
    assert short[0] == pytest.approx(query[0, :8] / np.linalg.norm(query[0, :8]), abs=1e-6)


async def test_embeddinggemma_embeds_and_ranks_by_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_embedding_gemma(tmp_path)
    texts = ["fox " * 30, "dog"]
    async with replica(tmp_path, monkeypatch) as (client, _):
        query = vectors(await embed(client, input="lazy", prompt_name="query"))
        documents = vectors(await embed(client, input=texts, prompt_name="document"))
        whole = vectors(await embed(client, input=[PROMPTS["document"] + text for text in texts]))
        ranked = await client.post("/rerank", json={"query": "lazy", "documents": texts})
    scores = {each["index"]: each["relevance_score"] for each in ranked.json()["results"]}
    assert documents.shape == (2, DENSE[1])
    assert documents == pytest.approx(whole, abs=1e-6)
    assert [scores[0], scores[1]] == pytest.approx((documents @ query[0]).tolist(), abs=1e-5)


@pytest.mark.observes("pooling.method", "pooling.normalize")
async def test_what_is_made_of_hidden_states_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_tiny_encoder(tmp_path, "bert")
    ids = [1, 77, 100, 2]
    with torch.inference_mode():
        first = oracle(torch.tensor([ids])).last_hidden_state[0, 0].numpy()
    pooling = {"method": "cls", "normalize": False}
    async with replica(tmp_path, monkeypatch, pooling=pooling) as (client, _):
        assert vectors(await embed(client, input=ids))[0] == pytest.approx(first, abs=1e-5)
