"""Names of adapters: one merged into the model, or several loaded separately."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.fakes import FakeServer, make_client, make_server_config
from tests.deployments.http.streams import ask

ADAPTERS = {"adapters": [{"name": "pirate", "path": "/secret/place"}]}


def make_server() -> FakeServer:
    return FakeServer(config=make_server_config(lora=ADAPTERS))


@pytest.mark.parametrize("name", ["tiny", "pirate", "tiny:pirate"])
async def test_a_merged_model_answers_to_both_names(name: str) -> None:
    answer = await ask("/v1/completions", make_server(), model=name, prompt="a")

    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name.removeprefix("tiny:")


@pytest.mark.parametrize("name", ["parrot", "tiny:parrot", "pirate:tiny", "tiny:"])
async def test_other_names_are_unknown(name: str) -> None:
    answer = await ask("/v1/completions", make_server(), model=name, prompt="a")

    assert answer.status_code == 404
    assert "serves 'tiny', 'pirate'" in answer.json()["error"]["message"]


async def test_the_adapter_is_listed_with_its_parent() -> None:
    async with make_client(make_server()) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        card = (await client.get("/v1/models/tiny:pirate")).json()

    assert [(entry["id"], entry["parent"]) for entry in cards] == [
        ("tiny", None),
        ("pirate", "tiny"),
    ]
    assert card == cards[1]


async def test_paths_of_adapters_are_not_shown() -> None:
    async with make_client(make_server()) as client:
        info = await client.get("/server_info")

    assert info.json()["config"]["lora"]["adapters"] == [{"name": "pirate"}]
    assert "/secret" not in info.text


SEVERAL = {"adapters": [{"name": name, "path": f"/{name}"} for name in ("pirate", "json")]}
ASKED = [("tiny", 0), ("pirate", 1), ("tiny:json", 2)]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/generate": {"text": "a"},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "stream": False},
    "/api/generate": {"prompt": "a", "raw": True, "stream": False},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "adapter"), ASKED)
async def test_the_engine_is_asked_for_the_adapter_that_a_request_names(
    path: str, name: str, adapter: int
) -> None:
    server = FakeServer(config=make_server_config(lora=SEVERAL))
    answer = await ask(path, server, model=name, **PATHS[path])

    assert answer.status_code == 200, answer.text
    assert [request.lora_id for request in server.client.requests] == [adapter]


@pytest.mark.parametrize("dialect", ["tgi", "lightllm"])
async def test_other_dialects_name_adapters_too(dialect: str) -> None:
    api = {"generate_dialect": dialect}
    server = FakeServer(config=make_server_config(lora=SEVERAL, api=api))
    body = {"model": "json", "inputs": "a", "parameters": {"max_new_tokens": 2}}
    answer = await ask("/generate", server, **body)

    assert answer.status_code == 200, answer.text
    assert [request.lora_id for request in server.client.requests] == [2]


async def test_all_adapters_are_listed() -> None:
    async with make_client(FakeServer(config=make_server_config(lora=SEVERAL))) as client:
        cards = (await client.get("/v1/models")).json()["data"]

    assert [card["id"] for card in cards] == ["tiny", "pirate", "json"]
