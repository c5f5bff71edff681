"""The status, type and code of each error."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from remora.configs.errors import (
    EngineError,
    InvalidRequest,
    InvariantViolated,
    NotFinite,
    PromptTooLong,
    QueueFull,
    RequestTimedOut,
    StepTimeout,
    Unavailable,
    UnknownModel,
)
from tests.deployments.fakes import (
    FakeEngine,
    FakeServer,
    make_client,
    make_config,
)

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


async def post(server: FakeServer, body: Any = CHAT, **options: Any) -> httpx.Response:
    async with make_client(server) as client:
        return await client.post(PATH, json=body, **options)


def outcome(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["type"], error["code"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("m", "p"), (400, "invalid_request_error", "invalid_value")),
        (PromptTooLong("m"), (400, "invalid_request_error", "context_length_exceeded")),
        (UnknownModel("m"), (404, "not_found_error", "model_not_found")),
        (QueueFull("m"), (429, "rate_limit_error", "queue_full")),
        (Unavailable("m"), (503, "overloaded_error", "unavailable")),
        (RequestTimedOut("m"), (504, "timeout_error", "timeout")),
        (StepTimeout("m"), (503, "server_error", "engine_failed")),
        (NotFinite("m"), (500, "server_error", "not_finite")),
        (InvariantViolated("m"), (503, "server_error", "engine_failed")),
        (KeyError("m"), (500, "server_error", "internal_error")),
        (TimeoutError("m"), (500, "server_error", "internal_error")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_table(error: Exception, expected: tuple[int, str, str], stream: bool) -> None:
    response = await post(FakeServer(FakeEngine(error=error)), CHAT | {"stream": stream})
    assert outcome(response) == expected


@pytest.mark.parametrize(
    ("method", "path", "options", "expected"),
    [
        ("GET", "/nowhere", {}, (404, "not_found_error", "not_found")),
        ("PUT", PATH, {}, (405, "invalid_request_error", "method_not_allowed")),
        ("GET", "/v1/models/a/b", {}, (404, "not_found_error", "model_not_found")),
        ("POST", PATH, {"params": "x" * 9000}, (414, "invalid_request_error", "url_too_long")),
        ("POST", PATH, {"json": {}}, (400, "invalid_request_error", "missing_required_parameter")),
        (
            "POST",
            PATH,
            {"json": CHAT | {"temprature": 1}},
            (400, "invalid_request_error", "unknown_field"),
        ),
    ],
)
async def test_faults_of_requests_have_a_type_and_a_code(
    method: str, path: str, options: dict[str, Any], expected: Any
) -> None:
    async with make_client(FakeServer(config=make_config(unknown_fields="reject"))) as client:
        assert outcome(await client.request(method, path, **options)) == expected


async def test_a_dead_engine_is_a_503() -> None:
    response = await post(FakeServer(FakeEngine(health_error=EngineError("dead"))))
    assert outcome(response) == (503, "overloaded_error", "unavailable")


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "x"},
        {"content-type": FORM, "origin": "http://elsewhere"},
        {"content-type": FORM, "origin": "null"},
    ],
)
async def test_other_content_types_are_refused(headers: dict[str, str]) -> None:
    assert outcome(await post(FakeServer(), headers=headers))[0] == 415


async def test_what_curl_calls_a_form_is_json_but_not_from_a_web_page() -> None:
    assert (await post(FakeServer(), headers={"content-type": FORM})).status_code == 200


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(EngineError("x"), False), (KeyError(), True)]
)
async def test_a_failed_engine_is_not_told_with_a_traceback_by_each_request(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    async with make_client(FakeServer(FakeEngine(error=error))) as client:
        await client.post("/v1/completions", json={"prompt": "a"})

    (record,) = [r for r in caplog.records if "failed" in r.getMessage()]
    assert (record.exc_info is not None) is has_traceback
