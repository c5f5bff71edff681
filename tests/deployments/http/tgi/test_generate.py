"""What /generate, /generate_stream and / answer in TGI's shape."""

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


async def test_an_answer_is_the_text() -> None:
    assert (await post(max_new_tokens=3)).json() == {"generated_text": "Par"}


async def test_the_prompt_is_repeated_where_it_is_asked_for() -> None:
    assert (await post(return_full_text=True)).json() == {"generated_text": "abParis."}


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


async def test_the_root_answers_with_a_list_unless_it_streams() -> None:
    assert (await post("/", max_new_tokens=1)).json() == [{"generated_text": "P"}]


async def test_generate_never_streams() -> None:
    assert (await post(stream=True, max_new_tokens=1)).json() == {"generated_text": "P"}


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


async def test_the_models_generation_config_is_not_looked_at() -> None:
    assert (await sampling_of(do_sample=True)).repetition_penalty == 1.0


async def test_a_draw_has_a_seed_that_can_be_asked_for_again() -> None:
    server = FakeServer()
    details = (await post(server=server, do_sample=True, details=True)).json()["details"]
    assert details["seed"] == server.client.requests[0].sampling.seed
    assert (await sampling_of(do_sample=True, seed=7)).seed == 7


async def test_stop_sequences_stay_in_the_text() -> None:
    sampling = await sampling_of(stop=["x"])
    assert (sampling.stop, sampling.include_stop_in_output) == (("x",), True)


async def test_an_answer_without_a_limit_has_100_tokens_or_what_room_there_is() -> None:
    assert (await sampling_of()).max_tokens == 100
    server = FakeServer(plan=make_plan(max_model_len=12))
    await post(server=server)
    assert server.client.requests[0].sampling.max_tokens == 10


async def test_the_end_of_a_prompt_is_kept() -> None:
    server = FakeServer()
    await post(server=server, truncate=1)
    assert server.client.requests[0].prompt_ids == [98]


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
    ("parameters", "named"),
    [
        ({"max_new_tokens": 0}, "parameters.max_new_tokens"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"typical_p": 0.9}, "parameters.typical_p"),
        ({"watermark": True}, "parameters.watermark"),
        ({"adapter_id": "x"}, "parameters.adapter_id"),
        ({"truncate": 0}, "parameters.truncate"),
        ({"top_n_tokens": 6}, "parameters.top_n_tokens"),
        ({"best_of": 2}, "parameters.best_of"),
        ({"n": 2}, "parameters.n"),
        ({"no_stop_trim": False}, "parameters.no_stop_trim"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "parameters.seed"),
        ({"best_of": 17, "do_sample": True}, "parameters.best_of"),
        ({"grammar": {"type": "lark", "value": "x"}}, "parameters.grammar.type"),
        ({"grammar": {"type": "json", "value": 1}}, "parameters.grammar.value"),
        ({"grammar": {"type": "json_schema", "value": {}}}, "parameters.grammar.value"),
        ({"grammar": {"type": "regex", "value": "refused"}}, "It cannot be compiled."),
        ({"stop": ["x"] * 17}, "parameters.stop"),
        ({"max_new_tokens": 1000}, "maximum context length"),
    ],
)
async def test_faults_are_422_and_name_the_field(parameters: dict[str, Any], named: str) -> None:
    response = await post(**parameters)

    error = response.json()
    assert response.status_code == 422
    assert error["error_type"] == "validation"
    assert named in error["error"]


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


async def test_a_body_without_inputs_is_told_so_in_the_dialect_of_its_path() -> None:
    async with make_client() as client:
        response = await client.post("/generate_stream", json={})
    assert response.status_code == 422
    assert response.json() == {"error": "inputs is required.", "error_type": "validation"}


async def test_info_names_the_model_and_its_limits() -> None:
    async with make_client() as client:
        info = (await client.get("/info")).json()
    assert info["model_id"] == "tiny"
    assert info["max_total_tokens"] == 1000
