"""/generate and /generate_stream in LightLLM's dialect, and its other routes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from remora.engine.types import SamplingParams
from tests.deployments.fakes import FakeEngine, FakeServer, make_client, make_config


def make_server(engine: FakeEngine | None = None, **changes: Any) -> FakeServer:
    config = make_config(generate_dialect="lightllm")
    return FakeServer(engine or FakeEngine(), config=config, **changes)


async def post(
    path: str = "/generate", server: FakeServer | None = None, **parameters: Any
) -> httpx.Response:
    async with make_client(server or make_server()) as client:
        return await client.post(path, json={"inputs": "ab", "parameters": parameters})


async def sampling_of(defaults: dict[str, Any] | None = None, **parameters: Any) -> SamplingParams:
    server = make_server(generation_defaults=defaults or {})
    response = await post(server=server, **parameters)
    assert response.status_code == 200, response.text
    return server.client.requests[0].sampling


async def test_an_answer_is_a_list_of_texts_with_counts() -> None:
    assert (await post(max_new_tokens=3)).json() == {
        "generated_text": ["Par"],
        "count_output_tokens": 3,
        "finish_reason": "length",
        "prompt_tokens": 2,
    }


async def test_details_are_the_tokens() -> None:
    tokens = (await post(max_new_tokens=2, return_details=True)).json()["tokens"]

    assert tokens[1] == {
        "id": 97,
        "text": "a",
        "logprob": -0.5,
        "special": False,
        "count_output_tokens": 2,
        "prompt_tokens": 2,
    }


async def test_several_answers_are_lists() -> None:
    answer = (await post(n=2, do_sample=True, max_new_tokens=1, return_details=True)).json()

    assert answer["generated_text"] == ["P", "P"]
    assert answer["count_output_tokens"] == [1, 1]
    assert answer["finish_reason"] == ["length", "length"]
    assert len(answer["tokens"]) == 2


async def test_of_several_that_are_made_the_likeliest_are_told() -> None:
    server = make_server()
    answer = (await post(server=server, n=1, best_of=3, do_sample=True)).json()
    assert answer["generated_text"] == ["Paris."]
    assert server.client.requests[0].sampling.n == 3


async def test_a_stream_has_frames_without_a_space_and_no_mark_at_its_end() -> None:
    response = await post("/generate_stream", max_new_tokens=2)

    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data:{") for frame in frames)
    first, last = (json.loads(frame.removeprefix("data:")) for frame in frames)
    assert first == {
        "token": {
            "id": 80,
            "text": "P",
            "logprob": -0.5,
            "special": False,
            "count_output_tokens": 1,
            "prompt_tokens": 2,
        },
        "generated_text": None,
        "finished": False,
        "finish_reason": None,
        "details": None,
    }
    assert (last["finished"], last["finish_reason"]) == (True, "length")


async def test_the_root_streams_where_the_body_says_so() -> None:
    async with make_client(make_server()) as client:
        whole = await client.post("/", json={"inputs": "ab"})
        stream = await client.post("/", json={"inputs": "ab", "stream": True})
    assert whole.json()["generated_text"] == ["Paris."]
    assert stream.text.startswith("data:{")


@pytest.mark.parametrize(
    ("defaults", "parameters", "temperature"),
    [
        ({}, {}, 0.0),
        ({"temperature": 0.6}, {}, 0.6),
        ({"temperature": 0.6}, {"do_sample": False}, 0.0),
        ({"temperature": 0.0}, {"do_sample": True}, 1.0),
        ({}, {"do_sample": True, "temperature": 0.5}, 0.5),
        ({}, {"temperature": 0.5}, 0.0),
    ],
)
async def test_tokens_are_drawn_where_the_body_or_the_model_says_so(
    defaults: dict[str, Any], parameters: dict[str, Any], temperature: float
) -> None:
    assert (await sampling_of(defaults, **parameters)).temperature == temperature


@pytest.mark.parametrize(
    ("stops", "texts", "ids"),
    [("x", ("x",), ()), (["x", "y"], ("x", "y"), ()), ([[5], [6]], (), (5, 6))],
)
async def test_stop_sequences_are_texts_or_single_tokens(
    stops: Any, texts: tuple[str, ...], ids: tuple[int, ...]
) -> None:
    sampling = await sampling_of(stop_sequences=stops)
    assert (sampling.stop, sampling.stop_token_ids) == (texts, ids)


async def test_outputs_have_16_tokens_unless_told_and_only_allowed_ones() -> None:
    sampling = await sampling_of(allowed_token_ids=[1, 2])
    assert (sampling.max_tokens, sampling.allowed_token_ids) == (16, (1, 2))


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("regular_constraint", "a+", "regex"),
        ("guided_json", {"type": "object"}, "json_schema"),
        ("guided_json", '{"type": "object"}', "json_schema"),
        ("guided_grammar", 'root ::= "a"', "ebnf"),
    ],
)
async def test_a_constraint_reaches_the_engine(field: str, value: Any, kind: str) -> None:
    server = make_server()

    await post(server=server, **{field: value})

    assert server.grammars.asked[0][0].kind == kind
    assert server.client.requests[0].grammar is not None


async def test_a_stream_tells_one_answer() -> None:
    error = (await post("/generate_stream", best_of=2)).json()["error"]
    assert (error["param"], error["code"]) == ("parameters.best_of", "unsupported")


async def test_images_are_refused() -> None:
    body = {"inputs": "ab", "multimodal_params": {"images": [{"type": "url", "data": "x"}]}}
    async with make_client(make_server()) as client:
        refused = await client.post("/generate", json=body)
        empty = await client.post("/generate", json=body | {"multimodal_params": {"images": []}})
    assert (refused.status_code, empty.status_code) == (400, 200)


async def test_an_end_of_sequence_has_no_text() -> None:
    server = make_server(FakeEngine(text="a" + chr(256)))
    tokens = (await post(server=server, return_details=True)).json()["tokens"]
    assert (tokens[1]["text"], tokens[1]["special"]) == ("", True)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_tokens_of_a_text_are_counted(method: str) -> None:
    async with make_client() as client:
        response = await client.request(method, "/tokens", json={"text": "abc"})
    assert response.json() == {"ntokens": 3}


async def test_the_model_is_named_and_its_load_is_told() -> None:
    async with make_client() as client:
        name = (await client.get("/get_model_name")).json()
        load = (await client.get("/token_load")).json()
    assert name == {"model_name": "tiny"}
    assert load == {"current_load": 0.5, "logical_max_load": 0.5, "dynamic_max_load": 0.5}
