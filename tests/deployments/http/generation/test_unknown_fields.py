"""Unknown fields of bodies: named in headers and in the log with what was probably meant."""

from __future__ import annotations

import logging

import pytest

from tests.deployments.fakes import FakeServer, make_client, make_config
from tests.deployments.http.streams import ask

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
LOGGER = "remora.deployments.http.core.unknown_fields"


async def test_the_nearest_known_field_is_suggested() -> None:
    options = {"stream": True, "stream_options": {"includ_usage": True}}
    response = await ask(CHAT, messages=HELLO, max_tokns=5, qqq=1, **options)

    named = response.headers["x-remora-ignored-fields"].split(", ")
    hints = response.headers["x-remora-suggested-fields"].split(", ")
    assert sorted(named) == ["max_tokns", "qqq", "stream_options.includ_usage"]
    assert hints == [
        "max_tokns=max_tokens",
        "stream_options.includ_usage=stream_options.include_usage",
    ]


async def test_a_refusal_suggests_it_too() -> None:
    strict = FakeServer(config=make_config(unknown_fields="reject"))
    response = await ask(CHAT, strict, messages=HELLO, max_tokns=5)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokns"
    assert "did you mean max_tokens?" in response.json()["error"]["message"]


@pytest.mark.observes("api.unknown_fields")
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_field_is_logged_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    messages = [{"role": "user", "content": "Hi", "nmae\n": "x"} for _ in range(3)]
    body = {"messages": messages, "modl": "tiny"}
    async with make_client() as client:
        with caplog.at_level(logging.WARNING, LOGGER):
            for _ in range(3):
                assert (await client.post(path, json=body)).status_code == 200

    texts = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert [text for text in texts if "modl" in text] == [
        "fields: ignored modl; did you mean model?"
    ]
    assert all("\n" not in text for text in texts)
    assert len(texts) == len(set(texts)) <= 2


async def test_a_client_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with make_client() as client:
        with caplog.at_level(logging.WARNING, LOGGER):
            for number in range(150):
                body = {"messages": HELLO, f"max_tokens{number}": 1, f"private {number}": 1}
                assert (await client.post(CHAT, json=body)).status_code == 200

    texts = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(texts) == 101
    assert texts[-1] == "fields: further unknown fields are not logged"
