"""/generate and /generate_stream in LightLLM's dialect, and its other routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.fakes import EOS, FakeEngine, FakeServer, make_client, make_config
from tests.deployments.http.golden import check_golden
from tests.deployments.http.streams import ask

LIGHT = make_config(generate_dialect="lightllm")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/generate", {"max_new_tokens": 3}),
    "details": ("/generate", {"max_new_tokens": 2, "return_details": True}),
    "several": (
        "/generate",
        {"n": 2, "do_sample": True, "max_new_tokens": 1, "return_details": True},
    ),
    "best of three": ("/generate", {"n": 1, "best_of": 3, "do_sample": True, "max_new_tokens": 2}),
    "stream": ("/generate_stream", {"max_new_tokens": 2}),
    "root": ("/", {"max_new_tokens": 2}),
    "end of sequence": ("/generate", {"return_details": True}),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_it_has_always_been(name: str) -> None:
    path, parameters = CASES[name]
    text = "a" + chr(EOS) if name == "end of sequence" else "Paris."
    server = FakeServer(FakeEngine(text=text), config=LIGHT)
    response = await ask(path, server, inputs="ab", parameters=parameters)
    check_golden(Path(__file__).parent, name, response)


@pytest.mark.parametrize(("images", "status"), [([{"type": "url", "data": "x"}], 400), ([], 200)])
async def test_images_are_refused(images: list[Any], status: int) -> None:
    fields = {"inputs": "ab", "multimodal_params": {"images": images}}
    assert (await ask("/generate", FakeServer(config=LIGHT), **fields)).status_code == status


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
