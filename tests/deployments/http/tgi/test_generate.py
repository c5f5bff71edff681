"""Responses of /generate, /generate_stream and /, in TGI's format."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from remora.configs.errors import EngineError
from remora.engine.types import SamplingParams
from tests.deployments.fakes import EOS, FakeEngine, FakeServer, make_client, make_plan


async def post(
    path: str = "/generate",
    server: FakeServer | None = None,
    *,
    stream: bool | None = None,
    **parameters: Any,
) -> httpx.Response:
    body: dict[str, Any] = {"inputs": "ab", "parameters": parameters}
    if stream is not None:
        body["stream"] = stream
    async with make_client(server) as client:
        return await client.post(path, json=body)


def events(response: httpx.Response) -> list[Any]:
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def sampling_of(**parameters: Any) -> SamplingParams:
    server = FakeServer(generation_defaults={"temperature": 0.6, "repetition_penalty": 1.3})
    response = await post(server=server, **parameters)
    assert response.status_code == 200, response.text
    return server.client.requests[0].sampling


async def test_an_answer_is_the_text_which_never_streams_here() -> None:
    assert (await post(stream=True, max_new_tokens=3)).json() == {"generated_text": "Par"}
    assert (await post(return_full_text=True)).json() == {"generated_text": "abParis."}
    assert (await post("/", max_new_tokens=1)).json() == [{"generated_text": "P"}]


async def test_details() -> None:
    response = await post(
        max_new_tokens=1, details=True, decoder_input_details=True, top_n_tokens=2
    )

    token = {"id": 80, "text": "P", "logprob": -0.5, "special": False}
    assert response.json()["details"] == {
        "finish_reason": "length",
        "generated_tokens": 1,
        "seed": None,
        "prefill": [
            {"id": 97, "text": "a", "logprob": None},
            {"id": 98, "text": "b", "logprob": -2.0},
        ],
        "tokens": [token],
        "top_tokens": [[token, {"id": 33, "text": "!", "logprob": -1.5, "special": False}]],
    }


@pytest.mark.parametrize(
    ("stopped_by", "reason"), [(None, "eos_token"), (".", "stop_sequence"), (46, "stop_sequence")]
)
async def test_why_an_answer_ended(stopped_by: Any, reason: str) -> None:
    server = FakeServer(FakeEngine(stopped_by=stopped_by))
    details = (await post(server=server, details=True)).json()["details"]
    assert details["finish_reason"] == reason


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
async def test_a_stream_tells_token_by_token_and_then_everything(path: str) -> None:
    response = await post(path, stream=True, max_new_tokens=2)

    def token(text: str) -> dict[str, Any]:
        return {"id": ord(text), "text": text, "logprob": -0.5, "special": False}

    ending = {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 2}
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response) == [
        {"index": 1, "token": token("P"), "generated_text": None, "details": None},
        {"index": 2, "token": token("a"), "generated_text": "Pa", "details": ending},
    ]


async def test_an_end_of_sequence_is_a_special_token_and_no_text() -> None:
    server = FakeServer(FakeEngine(text="a" + chr(EOS)))
    whole = (await post(server=server, details=True)).json()
    assert [t["special"] for t in whole["details"]["tokens"]] == [False, True]


async def test_the_best_of_several_is_the_answer() -> None:
    response = await post(best_of=3, do_sample=True, details=True, max_new_tokens=1)

    details = response.json()["details"]
    assert len(details["best_of_sequences"]) == 2
    assert details["best_of_sequences"][0]["generated_text"] == "P"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 1.0}, 0.0),
        ({"top_p": 0.5}, 1.0),
        ({"top_k": 5}, 1.0),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
    ],
)
async def test_tokens_are_drawn_only_where_it_is_asked_for(
    parameters: dict[str, Any], temperature: float
) -> None:
    assert (await sampling_of(**parameters)).temperature == temperature


async def test_a_draw_has_a_seed_that_can_be_asked_for_again() -> None:
    server = FakeServer()
    details = (await post(server=server, do_sample=True, details=True)).json()["details"]
    assert details["seed"] == server.client.requests[0].sampling.seed
    assert (await sampling_of(do_sample=True, seed=7)).seed == 7


async def test_defaults_are_tgis_and_not_the_models() -> None:
    sampling = await sampling_of(do_sample=True, stop=["x"])
    assert (sampling.stop, sampling.include_stop_in_output) == (("x",), True)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.0, 100)

    server = FakeServer(plan=make_plan(max_model_len=12))
    await post(server=server)
    await post(server=server, truncate=1)
    assert server.client.requests[0].sampling.max_tokens == 10  # the remaining context
    assert server.client.requests[1].prompt_ids == [98]


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        ({"type": "json", "value": {"type": "object"}}, "json_schema"),
        ({"type": "json", "value": '{"type": "object"}'}, "json_schema"),
        ({"type": "json_schema", "value": {"name": "x", "schema": {}}}, "json_schema"),
        ({"type": "regex", "value": "a+"}, "regex"),
    ],
)
async def test_a_grammar_reaches_the_engine(grammar: dict[str, Any], kind: str) -> None:
    server = FakeServer()

    response = await post(server=server, grammar=grammar)

    assert response.status_code == 200
    assert server.grammars.asked[0][0].kind == kind
    assert server.client.requests[0].grammar is not None


@pytest.mark.parametrize(
    "parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}]
)
async def test_what_a_stream_cannot_tell_is_refused(parameters: dict[str, Any]) -> None:
    response = await post("/generate_stream", **parameters)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")


async def test_an_error_after_the_first_token_is_an_event() -> None:
    server = FakeServer(FakeEngine(error=EngineError("x"), fail_at=1))
    last = events(await post("/generate_stream", server))[-1]
    assert set(last) == {"error", "error_type"}
    assert last["error_type"] == "generation"


async def test_info_names_the_model_and_its_limits() -> None:
    async with make_client() as client:
        info = (await client.get("/info")).json()
    assert info["model_id"] == "tiny"
    assert info["max_total_tokens"] == 1000
