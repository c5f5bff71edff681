"""The names of an adapter that is merged into the model."""

from __future__ import annotations

import pytest

from tests.deployments.fakes import FakeServer, make_client, make_server_config

ADAPTERS = {"adapters": [{"name": "pirate", "path": "/secret/place"}]}


def make_server() -> FakeServer:
    return FakeServer(config=make_server_config(lora=ADAPTERS))


@pytest.mark.parametrize("name", ["tiny", "pirate", "tiny:pirate"])
async def test_a_merged_model_answers_to_both_names(name: str) -> None:
    async with make_client(make_server()) as client:
        answer = await client.post("/v1/completions", json={"model": name, "prompt": "a"})

    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "tiny"


@pytest.mark.parametrize("name", ["parrot", "tiny:parrot", "pirate:tiny", "tiny:"])
async def test_other_names_are_unknown(name: str) -> None:
    async with make_client(make_server()) as client:
        answer = await client.post("/v1/completions", json={"model": name, "prompt": "a"})

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


async def test_paths_of_adapters_are_nobody_elses_business() -> None:
    async with make_client(make_server()) as client:
        told = await client.get("/server_info")

    assert told.json()["config"]["lora"] == {"adapters": [{"name": "pirate"}]}
    assert "/secret" not in told.text
