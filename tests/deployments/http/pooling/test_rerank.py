"""/v1/rerank, /v1/score, /classify, /pooling and /encode with tiny real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import (
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from remora.configs.errors import ConfigError
from tests.deployments.pooling_replica import replica
from tests.engine.pooling.test_rewards import save_process_rewards
from tests.tiny_encoders import make_framing_tokenizer, make_tiny_encoder, randomise
from tests.tiny_models import COMMON, make_tiny_tokenizer

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "a fox", "The quick brown fox " * 20]
DECODER = {**COMMON, "num_hidden_layers": 2}


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def scores_of(oracle: Any, pairs: list[dict[str, Any]]) -> list[float]:
    with torch.inference_mode():
        return [
            float(oracle(**{k: torch.tensor([v]) for k, v in pair.items()}).logits[0, 0].sigmoid())
            for pair in pairs
        ]


def framed(query: str, document: str) -> dict[str, Any]:
    found = make_framing_tokenizer().backend_tokenizer.encode(query, document)
    return {"input_ids": found.ids, "token_type_ids": found.type_ids}


@pytest.mark.parametrize("family", ["bert", "deberta"])
async def test_cross_encoders_read_both_texts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    oracle = make_tiny_encoder(tmp_path, family, classifies=True, num_labels=1)
    wanted = scores_of(oracle, [framed(QUERY, text) for text in DOCUMENTS])
    order = sorted(range(3), key=lambda index: -wanted[index])
    async with replica(tmp_path, monkeypatch) as (client, server):
        given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        ranked = await post(client, "/v1/rerank", query=QUERY, documents=given)
        best = await post(
            client, "/rerank", query=QUERY, documents=given, top_n=1, return_documents=False
        )
        scored = await post(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        paired = await post(client, "/score", text_1=[QUERY] * 3, text_2=DOCUMENTS)
        by_handle = await server.rerank({"query": QUERY, "documents": DOCUMENTS})
        for body, param in (
            ({"text_1": "a"}, "text_2"),
            ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
            ({"text_1": "a", "text_2": []}, "text_2"),
            ({"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ):
            response = await client.post("/v1/score", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param, response.text
    results = ranked["results"]
    assert [result["index"] for result in results] == order
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[i] for i in order]
    found = [result["relevance_score"] for result in results]
    assert found == pytest.approx([wanted[index] for index in order], abs=1e-5)
    assert [set(result) for result in best["results"]] == [{"index", "relevance_score"}]
    for answer in (scored, paired):
        assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    assert by_handle["results"] == results


async def test_pairs_are_cut_at_the_side_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_tiny_encoder(tmp_path, "bert", classifies=True, num_labels=1)
    encode = make_framing_tokenizer().backend_tokenizer.encode
    query, document = (encode(text, add_special_tokens=False).ids for text in ("fox", QUERY * 4))
    length = len(query) + 8  # three special tokens, five of the document
    wanted = scores_of(
        oracle,
        [
            {
                "input_ids": [1, *query, 2, *part, 2],
                "token_type_ids": [0] * (len(query) + 2) + [1] * 6,
            }
            for part in (document[:5], document[-5:])
        ],
    )
    async with replica(tmp_path, monkeypatch) as (client, _):
        found = [
            await post(
                client,
                "/score",
                text_1="fox",
                text_2=QUERY * 4,
                truncate_prompt_tokens=length,
                truncation_side=side,
            )
            for side in ("right", "left")
        ]
    assert [one["data"][0]["score"] for one in found] == pytest.approx(wanted, abs=1e-5)
    assert [one["usage"]["prompt_tokens"] for one in found] == [length, length]


async def test_embedders_compare_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_encoder(tmp_path, "bert")
    async with replica(tmp_path, monkeypatch) as (client, _):
        answer = await post(client, "/v1/embeddings", input=[QUERY, *DOCUMENTS])
        vectors = np.array([entry["embedding"] for entry in answer["data"]])
        scored = await post(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        pooled = await post(client, "/pooling", input=[QUERY])
        raw = await post(client, "/encode", text=QUERY)
        several = await post(client, "/encode", text=[QUERY, "a"])
        tokens = await post(client, "/pooling", input="a fox", task="token_embed")
    wanted = vectors[1:] @ vectors[0]
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, abs=1e-5)
    assert pooled["data"][0]["data"] == pytest.approx(vectors[0], abs=1e-6)
    assert raw["embedding"] == pytest.approx(vectors[0], abs=1e-6)
    assert len(several) == 2
    num_tokens = len(make_framing_tokenizer()("a fox")["input_ids"])
    assert np.array(tokens["data"][0]["data"]).shape == (num_tokens, 48)


@pytest.mark.observes("pooling.activation")
@pytest.mark.parametrize("family", ["modernbert", "distilbert"])
async def test_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    labels = {0: "no", 1: "maybe", 2: "yes"}
    oracle = make_tiny_encoder(tmp_path, family, classifies=True, id2label=labels)
    ids = make_framing_tokenizer()(QUERY)["input_ids"]
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0]
    async with replica(tmp_path, monkeypatch) as (client, _):
        (found,) = (await post(client, "/classify", input=QUERY))["data"]
        native = await post(client, "/classify", text=QUERY)
        refused = await client.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert found["probs"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
    assert found["label"] == labels[int(logits.argmax())]
    assert native["embedding"] == pytest.approx(found["probs"])
    assert "3 labels" in refused.json()["error"]["message"]
    pooling = {"activation": "none"}
    async with replica(tmp_path, monkeypatch, pooling=pooling) as (client, _):
        (raw,) = (await post(client, "/classify", input=QUERY))["data"]
    assert raw["probs"] == pytest.approx(logits.tolist(), abs=1e-4)


def save_decoder(folder: Path, model: Any) -> Any:
    model.eval()
    randomise(model)
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return model


async def test_reward_models_read_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Qwen2Config(**DECODER, num_labels=1)
    oracle = save_decoder(tmp_path, Qwen2ForSequenceClassification(config))
    messages = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": "Paris."}]
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    with torch.inference_mode():
        wanted = float(oracle(torch.tensor([ids])).logits[0, 0])
    async with replica(tmp_path, monkeypatch) as (client, server):
        assert server._served.plan.task == "reward"
        (found,) = (await post(client, "/classify", messages=messages))["data"]
        short = await post(client, "/classify", messages=messages, truncate_prompt_tokens=4)
        (pooled,) = (await post(client, "/pooling", input=ids))["data"]
        native = await post(client, "/encode", input_ids=ids)
        several = await post(client, "/encode", input_ids=[ids, [3, 4]])
    assert found["probs"] == pytest.approx([wanted], abs=2e-4)
    assert short["usage"]["prompt_tokens"] == 4
    assert pooled["data"] == pytest.approx([wanted], abs=2e-4)
    assert native["embedding"] == pytest.approx([wanted], abs=2e-4)
    assert several[0]["embedding"] == pytest.approx([wanted], abs=2e-4)


@pytest.mark.observes("pooling.step_token")
async def test_process_rewards_are_given_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = save_process_rewards(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    step = "<|im_end|>"
    text = f"The fox{step} jumps over{step} the lazy dog{step}"
    ids = make_tiny_tokenizer()(text)["input_ids"]
    rewards = wanted(ids, 2)
    async with replica(tmp_path, monkeypatch, pooling={"step_token": step}) as (client, _):
        pooled = (await post(client, "/pooling", input=[text, f"A fox{step}"]))["data"]
        states = (await post(client, "/pooling", input=text, task="token_embed"))["data"]
        native = await post(client, "/encode", input_ids=ids)
        missing = await client.post("/pooling", json={"input": "The fox"})
        labels = await client.post("/classify", json={"input": text})
        pair = await client.post("/score", json={"text_1": "a", "text_2": "b"})
    assert len(rewards) == 3
    assert np.array(pooled[0]["data"]) == pytest.approx(rewards.numpy(), abs=1e-5)
    assert np.array(native["embedding"]) == pytest.approx(rewards.numpy(), abs=1e-5)
    assert np.shape(pooled[1]["data"]) == (1, 2)
    assert np.shape(states[0]["data"]) == (len(ids), COMMON["hidden_size"])
    assert f"has no {step}" in missing.json()["error"]["message"]
    assert "ask /pooling" in labels.json()["error"]["message"]
    assert "ask /pooling" in pair.json()["error"]["message"]
    with pytest.raises(ConfigError, match=r"pooling\.step_token is '<extra_0>', which is"):
        async with replica(tmp_path, monkeypatch):
            pass


@pytest.mark.observes("model.task")
async def test_decoders_that_embed_take_the_last_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = save_decoder(tmp_path / "bare", Qwen3Model(Qwen3Config(**DECODER)))
    rows = [[5, 6, 7, 8], [9], [5, 6, 7, 9], list(range(3, 90))]
    wanted = []
    with torch.inference_mode():
        for row in rows:
            last = oracle(torch.tensor([row])).last_hidden_state[0, -1]
            wanted.append(torch.nn.functional.normalize(last, dim=0).numpy())
    async with replica(tmp_path / "bare", monkeypatch) as (client, server):
        assert server._served.plan.task == "embed"
        answer = await post(client, "/v1/embeddings", input=rows)
    for entry, vector in zip(answer["data"], wanted, strict=True):
        assert entry["embedding"] == pytest.approx(vector, abs=1e-5)

    whole = Qwen3ForCausalLM(Qwen3Config(**DECODER))
    whole.model = oracle
    whole.save_pretrained(tmp_path / "whole")
    make_tiny_tokenizer().save_pretrained(tmp_path / "whole")
    model = {"task": "embed"}
    async with replica(tmp_path / "whole", monkeypatch, model=model) as (client, _):
        answer = await post(client, "/v1/embeddings", input=rows)
    assert answer["data"][3]["embedding"] == pytest.approx(wanted[3], abs=1e-5)


@pytest.mark.observes(
    "pooling.pair_template", "pooling.instruction", "pooling.yes_token", "pooling.no_token"
)
@pytest.mark.parametrize("tied", [False, True])
async def test_generating_rerankers_say_yes_or_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    config = Qwen3Config(**{**DECODER, "tie_word_embeddings": tied})
    oracle = save_decoder(tmp_path, Qwen3ForCausalLM(config))
    tokenizer = make_tiny_tokenizer()
    yes, no = tokenizer.encode("a"), tokenizer.encode("b")
    text = f"Is it {DOCUMENTS[0]} for {QUERY} as to find {{query}}?"
    with torch.inference_mode():
        logits = oracle(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
    wanted = float(logits[[yes[0], no[0]]].softmax(0)[0])
    sections: dict[str, Any] = {
        "model": {"task": "rerank"},
        "pooling": {
            "pair_template": "Is it {document} for {query} as to {instruction}?",
            "instruction": "find {query}",
            "yes_token": "a",
            "no_token": "b",
        },
    }
    async with replica(tmp_path, monkeypatch, **sections) as (client, _):
        body = {"query": QUERY, "documents": DOCUMENTS}
        answer = await post(client, "/v1/rerank", **body)
        other = await post(client, "/v1/rerank", **body, instruction="lose")
        refused = await client.post("/v1/rerank", json={**body, "truncate_prompt_tokens": 5})
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert found[0] == pytest.approx(wanted, abs=1e-5)
    changed = {result["index"]: result["relevance_score"] for result in other["results"]}
    assert abs(changed[0] - wanted) > 1e-5
    assert refused.status_code == 400
    assert "what stands around it is kept" in refused.json()["error"]["message"]


def test_what_the_default_template_says_is_what_the_model_was_trained_with() -> None:
    from remora.configs.sections.pooling import PoolingSection
    from remora.engine.pooling.facts import YES_NO, PoolingFacts
    from remora.engine.pooling.stages import Stage
    from remora.engine.pooling.texts import PairTemplate

    facts = PoolingFacts(
        task="rerank",
        methods=("last",),
        prompts={},
        stages=(Stage(name=YES_NO, inputs=1, outputs=1),),
    )
    template = PairTemplate.of(facts, PoolingSection())
    assert template is not None
    before, after = template.parts("Q", "I")
    assert before.endswith("<|im_start|>user\n<Instruct>: I\n<Query>: Q\n<Document>: ")
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert json.dumps(before).count("<|im_start|>") == 2
