"""`return_hidden_states` of SGLang's /generate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.deployments.fakes import FakeServer, make_server_config
from tests.deployments.http.streams import ask


def make_server(**sections: Any) -> FakeServer:
    return FakeServer(config=make_server_config(**sections))


post = partial(ask, "/generate", text="ab")


@pytest.mark.observes("api.hidden_states")
async def test_states_of_the_prompt_come_together_and_then_each_of_the_output() -> None:
    server = make_server(api={"hidden_states": True})
    params = {"max_new_tokens": 3}
    response = await post(server, return_hidden_states=True, sampling_params=params)
    assert response.status_code == 200, response.text
    states = response.json()["meta_info"]["hidden_states"]
    assert states == [[[0, 1], [2, 3]], [4, 5], [6, 7]]
    assert server.client.requests[0].sampling.hidden_states


@pytest.mark.parametrize("asked", [{}, {"return_hidden_states": False}])
async def test_they_are_only_returned_on_request(asked: dict[str, Any]) -> None:
    server = make_server(api={"hidden_states": True})
    await post(server, **asked)
    assert not server.client.requests[0].sampling.hidden_states


@pytest.mark.observes("limits.max_hidden_tokens")
@pytest.mark.parametrize(("max_new_tokens", "status"), [(8, 200), (9, 400)])
async def test_they_have_a_limit_of_tokens(max_new_tokens: int, status: int) -> None:
    server = make_server(api={"hidden_states": True}, limits={"max_hidden_tokens": 10})
    params = {"max_new_tokens": max_new_tokens}
    response = await post(server, return_hidden_states=True, sampling_params=params)
    assert response.status_code == status
