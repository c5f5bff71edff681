"""TGI's API: its conformance table, and the seeds and adapters of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.fakes import FakeEngine, FakeServer, make_server_config
from tests.deployments.http.conformance import ABSENT, Row, check_row
from tests.deployments.http.streams import ask

SOURCE = "text-generation-inference, docs/openapi.json"
CLIENT = "text-generation-inference, clients/python/tests/test_types.py"
GENERATE, STREAM = "/generate", "/generate_stream"
TOKEN = {"id": 97, "text": "a", "logprob": float, "special": False}
ENDING = {"finish_reason": "eos_token", "generated_tokens": 2, "seed": None}
DETAILS = {**ENDING, "prefill": [], "tokens": [TOKEN, {"id": 98}], "top_tokens": ABSENT}
TEXT = {"generated_text": "ab", "details": ABSENT}
INVALID = {"error": str, "error_type": "validation"}
EVENT = {"index": 1, "token": TOKEN, "generated_text": None, "details": None}
LAST = {"index": 2, "token": {"text": "b"}, "generated_text": "ab",
        "details": {**ENDING, "input_length": 2}}  # fmt: skip
DRAWN: dict[str, Any] = {"do_sample": True, "details": True}
CANDIDATE = {**ENDING, "seed": int, "generated_text": "ab", "tokens": [TOKEN, Any]}


def generate(answer: Any, status: int = 200, source: str = SOURCE, **parameters: Any) -> Row:
    return Row(source, GENERATE, {"inputs": "Hi", "parameters": parameters}, status, answer)


def refused(**parameters: Any) -> Row:
    return generate(INVALID, 422, CLIENT, **parameters)


def stream(answer: Any, status: int = 200, **parameters: Any) -> Row:
    return Row(SOURCE, STREAM, {"inputs": "Hi", "parameters": parameters}, status, answer)


TABLE: dict[str, Row] = {
    "text": generate(TEXT),
    "full text": generate({"generated_text": "Hiab"}, return_full_text=True),
    "details": generate({"generated_text": "ab", "details": DETAILS}, details=True),
    "details of the prompt": generate(
        {"details": {"prefill": [{"id": 72, "text": "H", "logprob": None}, {"id": 105}]}},
        decoder_input_details=True,
    ),
    "likely tokens": generate(
        {"details": {"top_tokens": [[TOKEN, Any], [{"id": 98}, Any]]}}, details=True, top_n_tokens=2
    ),
    "length": generate(
        {"details": {"finish_reason": "length", "generated_tokens": 1}}, details=True,
        max_new_tokens=1,
    ),
    "seed": generate({"details": {"seed": 7}}, **DRAWN, seed=7),
    "drawn seed": generate({"details": {"seed": int}}, **DRAWN),
    "no seed of a greedy answer": generate({"details": {"seed": None}}, details=True),
    "best of three": generate(
        {"details": {"seed": int, "best_of_sequences": [CANDIDATE, CANDIDATE]}}, **DRAWN, best_of=3
    ),
    "typical": generate({"details": {"seed": int}}, typical_p=0.5, details=True),
    "adapter": generate(TEXT, adapter_id="ada"),
    "adapter that is not there": generate(
        {"error": str, "error_type": "generation"}, 404, adapter_id="other"
    ),
    "constraint": generate(TEXT, grammar={"type": "regex", "value": "ab"}),
    "stream": stream([EVENT, LAST]),
    "stream with likely tokens": stream(
        [{"top_tokens": [TOKEN, Any]}, {"top_tokens": [Any, Any]}], top_n_tokens=2
    ),
    "drawn stream": stream([EVENT, {"details": {"seed": 3}}], do_sample=True, seed=3),
    "stream of several": stream(INVALID, 422, do_sample=True, best_of=2),
    "root": Row(SOURCE, "/", {"inputs": "Hi"}, 200, [TEXT]),
    "root, streamed": Row(SOURCE, "/", {"inputs": "Hi", "stream": True}, 200, [EVENT, LAST]),
    "information": Row(SOURCE, "/info", None, 200, {"model_id": "tiny", "max_best_of": int}),
    "no inputs": Row(SOURCE, GENERATE, {"inputs": 1}, 422, INVALID),
    **{
        f"{name} {value}": refused(**{name: value})
        for name, values in {
            "best_of": (0, 2),
            "repetition_penalty": (0.0,),
            "temperature": (-1.0,),
            "top_k": (-2,),
            "top_p": (0.0, 1.1),
            "typical_p": (0.0, 1.1),
            "truncate": (0,),
            "top_n_tokens": (6,),
            "watermark": (True,),
            "adapter_id": ("",),
            "grammar": ({"type": "xml", "value": ""},),
        }.items()
        for value in values
    },
}  # fmt: skip


def make_server(text: str = "ab") -> FakeServer:
    adapters = [{"name": name, "path": f"/adapters/{name}"} for name in ("ada", "eva")]
    return FakeServer(FakeEngine(text=text), config=make_server_config(lora={"adapters": adapters}))


@pytest.mark.parametrize("name", TABLE)
async def test_a_request_is_answered_as_tgi_does(name: str) -> None:
    await check_row(TABLE[name], make_server())


async def test_each_candidate_has_the_seed_that_repeats_it() -> None:
    server = make_server()
    body = {"inputs": "Hi", "parameters": {**DRAWN, "best_of": 3}}
    details = (await ask(GENERATE, server, **body)).json()["details"]

    seeds = {details["seed"], *(each["seed"] for each in details["best_of_sequences"])}
    assert len(seeds) == 3
    assert server.client.requests[0].sampling.seed in seeds
    assert server.client.requests[0].sampling.n == 3


@pytest.mark.parametrize(
    ("fields", "lora_id"), [({}, 0), ({"model": "tiny"}, 1), ({"model": "ada"}, 1)]
)
async def test_an_adapter_is_named_by_its_id(fields: Any, lora_id: int) -> None:
    server = make_server()
    parameters = {"adapter_id": "ada"} if lora_id else {}
    await ask(GENERATE, server, inputs="Hi", parameters=parameters, **fields)
    assert bool(server.client.requests[0].lora_id) is bool(lora_id)


async def test_two_adapters_are_refused() -> None:
    response = await ask(
        GENERATE, make_server(), inputs="Hi", parameters={"adapter_id": "ada"}, model="eva"
    )
    assert response.status_code == 422


async def test_typical_sampling_reaches_the_engine() -> None:
    server = make_server()
    await ask(GENERATE, server, inputs="Hi", parameters={"typical_p": 0.5})
    sampling = server.client.requests[0].sampling
    assert (sampling.typical_p, sampling.temperature) == (0.5, 1.0)
