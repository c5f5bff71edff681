"""`return_hidden_states` of SGLang's /generate."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployments.fakes import FakeServer, make_client, make_server_config


def make_server(**sections: Any) -> FakeServer:
    return FakeServer(config=make_server_config(**sections))


async def post(server: FakeServer, **body: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post("/generate", json={"text": "ab", **body})


@pytest.mark.observes("api.hidden_states")
async def test_those_of_the_prompt_come_together_and_then_each_of_the_output() -> None:
    server = make_server(api={"hidden_states": True})
    params = {"max_new_tokens": 3}
    response = await post(server, return_hidden_states=True, sampling_params=params)
    assert response.status_code == 200, response.text
    states = response.json()["meta_info"]["hidden_states"]
    assert states == [[[0, 1], [2, 3]], [4, 5], [6, 7]]
    assert server.client.requests[0].sampling.hidden_states


@pytest.mark.parametrize("asked", [{}, {"return_hidden_states": False}])
async def test_they_are_not_told_unasked(asked: dict[str, Any]) -> None:
    server = make_server(api={"hidden_states": True})
    await post(server, **asked)
    assert not server.client.requests[0].sampling.hidden_states


async def test_a_server_that_tells_none_says_so() -> None:
    response = await post(make_server(), return_hidden_states=True)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "return_hidden_states")
    assert "api.hidden_states is off" in error["message"]


@pytest.mark.observes("limits.max_hidden_tokens")
async def test_of_too_many_tokens_they_are_not_told() -> None:
    sections = {"api": {"hidden_states": True}, "limits": {"max_hidden_tokens": 10}}
    params = {"max_new_tokens": 9}
    response = await post(
        make_server(**sections), return_hidden_states=True, sampling_params=params
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "return_hidden_states")
    assert "told of 10 at most" in error["message"]
