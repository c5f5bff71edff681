"""`custom_logit_processor` and `custom_params` of requests reach the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.fakes import FakeServer, make_client

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "ab"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "ab"}]},
    "/generate": {"text": "ab"},
}
ASKED: dict[str, Any] = {"custom_logit_processor": "edit", "custom_params": {"id": 3}}


async def sent(path: str, body: dict[str, Any]) -> Any:
    server = FakeServer()
    async with make_client(server) as client:
        response = await client.post(path, json=body)
    return response, server.client.requests


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_names_a_processor_and_what_it_is_given(path: str) -> None:
    body = BODIES[path] | ({"sampling_params": ASKED} if path == "/generate" else ASKED)
    response, (request,) = await sent(path, body)
    assert response.status_code == 200, response.text
    assert request.sampling.custom_logit_processor == "edit"
    assert request.sampling.custom_params == {"id": 3}


async def test_a_call_of_generate_names_one_for_all_its_prompts() -> None:
    body = {
        "text": ["ab", "cd"],
        "custom_logit_processor": "edit",
        "sampling_params": [{"custom_logit_processor": "own"}, {}],
    }
    response, requests = await sent("/generate", body)
    assert response.status_code == 200, response.text
    assert [request.sampling.custom_logit_processor for request in requests] == ["own", "edit"]
