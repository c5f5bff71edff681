"""vLLM's own routes of models that generate: tokens in and out, scores, tokenizer settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyCheckpoints
from tests.deployments.fakes import (
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
    make_plan,
    make_server_config,
)
from tests.deployments.http.conformance import ABSENT, Row, check_row
from tests.deployments.http.streams import ask

SOURCE = "vLLM, test_serving_tokens"
SCORING = "vLLM, test_generative_scoring"
PATH = "/inference/v1/generate"


def generate(status: int, answer: Any, /, *, stream: bool = False, **sampling: Any) -> Row:
    body = {"token_ids": [72, 105], "sampling_params": sampling, "stream": stream}
    return Row(SOURCE, PATH, body, status, answer)


def refused(param: str, **sampling: Any) -> Row:
    return generate(400, {"error": {"param": param}}, **sampling)


def scoring(status: int, answer: Any, /, **fields: Any) -> Row:
    body = {"query": "ab", "items": ["c", "d"], "label_token_ids": [80, 33]}
    return Row(SCORING, "/generative_scoring", body | fields, status, answer)


CHOICE = {"index": 0, "token_ids": [97, 98], "finish_reason": "stop", "logprobs": None}
LINE = {"token": "token_id:97", "logprob": -0.5, "top_logprobs": [{"token": "token_id:97"}]}
TABLE: dict[str, Row] = {
    "tokens": generate(
        200, {"request_id": str, "choices": [CHOICE], "prompt_logprobs": None, "id": ABSENT}
    ),
    "length": generate(
        200,
        {"choices": [{"token_ids": [97], "finish_reason": "length"}], "usage": {"total_tokens": 3}},
        max_tokens=1,
    ),
    "two choices": generate(200, {"choices": [CHOICE, {"index": 1, "token_ids": [97, 98]}]}, n=2),
    "fields of vLLM's engine": generate(
        200, {"choices": [CHOICE]}, detokenize=False, output_kind=2
    ),
    "log-probabilities": generate(
        200, {"choices": [{"logprobs": {"content": [LINE, Any]}}]}, logprobs=1
    ),
    "log-probabilities of the prompt": generate(
        200, {"prompt_logprobs": [None, {"105": {"logprob": float}}]}, prompt_logprobs=0
    ),
    "a stream": generate(
        200,
        [
            {"request_id": str, "choices": [{"token_ids": [97], "finish_reason": None}]},
            {"choices": [{"token_ids": [98], "finish_reason": "stop"}]},
            "[DONE]",
        ],
        stream=True,
    ),
    "no tokens": Row(
        SOURCE,
        PATH,
        {"token_ids": [], "sampling_params": {}},
        400,
        {"error": {"param": "token_ids"}},
    ),
    "no sampling parameters": Row(
        SOURCE, PATH, {"token_ids": [1]}, 200, {"choices": [{"token_ids": [97, 98]}]}
    ),
    "unknown tokens": Row(
        SOURCE,
        PATH,
        {"token_ids": [9999], "sampling_params": {}},
        400,
        {"error": {"param": "token_ids"}},
    ),
    "images": Row(
        SOURCE,
        PATH,
        {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}},
        400,
        {"error": {"param": "features", "code": "unsupported"}},
    ),
    "an adapter that is not there": Row(
        SOURCE, PATH, {"token_ids": [1], "sampling_params": {}, "model": "x"}, 404, {"error": {}}
    ),
    "a temperature that is too low": refused("sampling_params.temperature", temperature=-1.0),
    "a wrong type": refused("sampling_params.n", n="two"),
    "no sampling parameter": refused("sampling_params.suffix", suffix="x"),
    "scores": scoring(
        200,
        {
            "object": "list",
            "data": [{"index": 0, "object": "score", "score": float}, {"index": 1}],
            "usage": {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8},
        },
    ),
    "labels that are not there": scoring(
        400, {"error": {"param": "label_token_ids"}}, label_token_ids=[]
    ),
    "the tokenizer's settings are off": Row(SOURCE, "/tokenizer_info", None, 404, {"error": {}}),
}


@pytest.mark.parametrize("name", TABLE)
async def test_conformance(name: str) -> None:
    await check_row(TABLE[name], FakeServer(client=FakeEngine(text="ab")))


async def test_scores_are_of_the_first_label_among_all() -> None:
    body: dict[str, Any] = {"query": "ab", "items": ["c"], "label_token_ids": [80, 33]}
    both = [math.exp(-0.5), math.exp(-1.5)]
    normal = (await ask("/generative_scoring", **body)).json()["data"][0]["score"]
    plain = (await ask("/generative_scoring", **body, apply_softmax=False)).json()
    assert normal == pytest.approx(both[0] / sum(both))
    assert plain["data"][0]["score"] == pytest.approx(both[0])


@pytest.mark.observes("api.tokenizer_info")
async def test_the_tokenizers_settings_are_those_of_its_file(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "TinyTokenizer", "name_or_path": "/secret", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    server = FakeServer(
        config=make_config(tokenizer_info=True), plan=make_plan(model_path=tmp_path)
    )
    async with make_client(server) as client:
        response = await client.get("/tokenizer_info")
    found = response.json()
    assert found["tokenizer_class"] == "TinyTokenizer"
    assert found["bos_token"] == "<s>"
    assert "chat_template" in found
    assert "/secret" not in response.text


async def test_adapters_are_listed_with_the_place_of_their_files() -> None:
    adapters = [
        {"name": "a", "path": "/adapters/a"},
        {"name": "b", "path": "s3://key:secret@store/b?token=secret"},
    ]
    server = FakeServer(config=make_server_config(lora={"adapters": adapters}))
    async with make_client(server) as client:
        cards = (await client.get("/v1/models")).json()["data"]
    assert [card["root"] for card in cards] == ["tiny", "/adapters/a", "s3://store/b"]
    assert [card["parent"] for card in cards] == [None, "tiny", "tiny"]


def test_token_strings_are_entries_of_the_vocabulary(tiny_checkpoints: TinyCheckpoints) -> None:
    from remora.engine.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tiny_checkpoints("llama"))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    entries = [tokenizer.entry(token_id) for token_id in ids]
    assert entries == tokenizer.backend.encode("the fox", add_special_tokens=False).tokens
    assert tokenizer.entry(10**6) == ""
